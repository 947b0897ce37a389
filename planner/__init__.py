"""From a module to a strategy and its program.

- `capture/`: a module becomes a `ModelGraph`.
- `problem.py`: graph, cluster and constraints: what is to be planned; `money.py`: what devices cost.
- `strategy/`: what is decided, as data and as a file.
- `sharding/`: tensor-parallel placements inside each distinct block.
- `expand/`: a strategy becomes the program of one step; `score.py` prices it.
- `plan.py`: where every search begins (`default_batch.py` asks whether another batch would serve better); `search/`: the best strategy, with its proof; `side_by_side.py` does parts of it in a
  second process.
- `explain/`: why it won, what was rejected, and which of nearly equal plans to take; `outcome.py`: what is handed back.
- `heterogeneous/`, `embedding/`: searches made of that one, over unlike machines and over where embedding tables stand.
- `recovery.py`: how a plan recovers from failures, where the cluster says how often it fails; `recovering.py` looks for one
  that recovers better.
- `kernels.py`: eager or compiled kernels, the better by its price.
- `local_updates.py`: whether replicas train by themselves, and on how many islands.
- `phases.py`: where a change of strategy between phases of training pays.
- `check.py`: a plan checked without a solver.
"""
