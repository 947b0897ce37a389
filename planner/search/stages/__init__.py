"""Blocks to pipeline stages: the stage problem of one candidate, and its solvers."""
