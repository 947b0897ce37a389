"""The search: the space, true lower bounds, the stage problem, the proof, and why the rest lost."""
