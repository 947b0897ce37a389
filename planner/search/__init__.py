"""The search, in the order in which a problem goes through it; `docs/planner.md` follows one problem all the way.

- `space/`: what there is to choose from, as numpy columns, one row a shape or a variant.
- `bounds/`: what each row can at best reach.
- `dives.py`: likely good rows first; `search.py`: then best bound first, over what is open (`open.py`): shapes,
  variants of some, candidates; what need not be offloaded is left out (`twins.py`).
- `stages/`: one candidate's stage problem: blocks to pipeline chunks, and how many of them are recomputed.
- `evaluate.py`: complete strategies simulated, and those near them (`nearby.py`).
- `points.py`: other tensor plans, where they may be worth it.
- `answer/`: the result checked, its rivals and why they lost, or why nothing fits.

`plan.py` drives all of this; `plan_parts.py` does for clusters of unlike devices or nodes, and irregular networks.
`tiers/` searches where embedding tables stand, beside the search that has them on the devices. `spending.py` says what
each step costs, for a limit in work.
"""
