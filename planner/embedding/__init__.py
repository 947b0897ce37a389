"""Embedding tables in tiers: which rows stand where, chosen together with the mesh.

- `options.py`: the choices for each class of tables; `terms.py`: what a choice adds to a step.
- `choose.py`: the choices of one strategy, by CP-SAT; `search.py`: meshes and tables together, best bound first.
- `answer.py`: the better of this search and the one with every table on the devices.
"""
