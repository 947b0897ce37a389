"""The search, in the order in which a problem goes through it.

- `space/`: what there is to choose from, as numpy columns, one row a mesh or a variant.
- `bounds/`: what each row can at best reach.
- `dives.py`: likely good rows first; `frontier.py`: then best bound first.
- `stages/`: one row's stage problem: blocks to pipeline chunks, and how many of them are recomputed.
- `evaluate.py`: complete strategies simulated.
- `answer/`: the result checked, its rivals and why they lost, or why nothing fits.

`plan.py` drives all of this; `plan_parts.py` does for clusters of unlike devices or nodes, and irregular networks.
`tiers/` searches where embedding tables stand, beside the search that has them on the devices.
"""
