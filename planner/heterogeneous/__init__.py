"""Clusters that are not one regular whole: unlike devices, irregular networks, nodes short of a device.

- `mixed.py`, `irregular.py`: such a cluster as parts with a space each.
- `placements.py`: which node takes which part of the mesh; `assign.py` finds that by CP-SAT, `cuts.py` bounds it.
- `plan_parts.py`: the best of the searches of all parts, under the least of their bounds.
"""
