"""Who takes part in a run.

- `accelerator.py`: the device that a rank computes on, its streams and random numbers.
- `mesh.py`: process groups, and the mesh whose axes a strategy names (`RankMesh`).
- `leaving.py`: the end of a process.

Open to other rooms: `accelerator`, `mesh`.
"""
