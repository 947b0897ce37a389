"""What there is to choose from: meshes, schedules and the rest, as numpy columns.

- `build.py`: the space of a problem; `meshes.py` has its meshes, `shapes.py` what memory and work depend on, `syncs.py` how gradients are synchronised.
- `refused.py`: kinds of them that whoever runs the plan refuses.
- `candidates.py`: from a row of the columns to a `Strategy`.
- `certificate.py`: what of the strategy file's keys is searched, fixed, stated, or left out and why.
"""
