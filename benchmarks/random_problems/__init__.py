"""The planner on problems nobody chose, and the laws that its answers must keep.

    python -m benchmarks.random_problems --seed 1 --cases 20 --json out.json

In the order in which a case goes through them:

- `families.py`, `sizes.py`: draw a model; `zoo.py`: models that no Hugging Face config describes
- `clusters.py`: draws a cluster
- `cases.py`: draws a case: model, cluster, batch, constraints
- `graphs.py`, `capture.py`: the model's graph, captured in a process of its own and kept
- `enumerate.py`, `draw.py`, `moves.py`, `choices.py`: complete strategies without the search: all of a small problem, some at
  random, and those one or two keys beside a strategy
- `keys.py`: one further key of the strategy file
- `answers.py`: plans in processes that are stopped at a limit
- `laws.py`, `bounded.py`, `verdicts.py`: what must hold of an answer, and of the bounds that prove it
- `weak.py`: which bounds are far below what they bound (`--weak`)
- `summary.py`: the table at the end
- `__main__.py`: the command; `inside.py`: the part of a case that runs in a fresh process
"""
