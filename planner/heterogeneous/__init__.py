"""Clusters that are not one regular whole: unlike devices, irregular networks, nodes short of a device.

- `mixed.py`, `irregular.py`: such a cluster as parts with a space each.
- `placements.py`: which node takes which part of the mesh; `assign.py` finds that by CP-SAT, `cuts.py` bounds it.
- `pool.py`: the searches of all parts, side by side; `plan_parts.py`: the best of them, under the least of their bounds.
"""
