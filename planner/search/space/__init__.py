"""What there is to choose from: meshes, schedules and the rest, as numpy columns.

- `build.py`: the space of a problem; `meshes.py` has its meshes, `syncs.py` how gradients are synchronised.
- `candidates.py`: from a row of the columns to a `Strategy`.
- `mixed.py`, `irregular.py`: clusters that are not one regular whole, as parts with a space each; `placements.py` says
  which node takes which part of the mesh, `assign.py` finds that by CP-SAT, `cuts.py` bounds it.
"""
