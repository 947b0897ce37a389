"""From a torch module to a ModelGraph. The only part of the planner that imports torch."""
