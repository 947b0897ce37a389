"""From a strategy to the program of one step: local work, memory, state and the schedule's orders."""
