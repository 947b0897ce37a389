"""Tensor-parallel placements: one legal sharding per operator of each distinct block, by a solve."""
