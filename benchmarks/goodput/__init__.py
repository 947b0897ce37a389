"""Goodput measured against predicted, under seeded failures of nodes: `python -m benchmarks.goodput --minutes 10 --cases 3`.

`nodes` starts, kills and brings back the nodes of a run; `worker` trains on them; `learnt` measures what the formulas of
`costmodel/recovery.py` are told; `cases` draws failures, asks the formulas, and measures every policy under the same failures.
"""
