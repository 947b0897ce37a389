"""Tensor-parallel placements: one legal sharding per operator of each distinct block, by a solve.

- `solve.py`: the way from a graph and a degree to a `TensorPlan` (`plan.py`).
- `rules.py`: what `[[tensor]]` entries fix, and the entries that say what a plan does.
- `problem.py`, `costs.py`: what there is to choose from in a block, as prepared integers.
- `experts.py`: layers of experts, which run over tp and ep as a whole.
- `blocks.py`: a block with its prices, and an answer to it.
- `solver.py`: the best choice for blocks that share tied parameters: unknown by unknown (`elimination.py`), or by CP-SAT
  (`cp_sat.py`).
- `pareto.py`: further plans of the Pareto set of time and memory.
"""
