"""Who takes part in a run.

- `accelerator.py`: the device that a rank computes on, its streams and random numbers.
- `mesh.py`: process groups, and the mesh whose axes a strategy names (`RankMesh`).
- `places.py`: which ranks stand together along which axes; no torch.
- `levels.py`: network levels between ranks, and the method that is used between them; no torch.
- `agreement.py`: decisions and errors told to all ranks.
- `gathers.py`: collectives whose names torch has changed.
- `progress.py`: who wants to know what a rank is doing.
- `leaving.py`: the end of a process.

Open to other rooms: `accelerator`, `mesh`, `places`, `levels`, `agreement`, `gathers`, `progress`, `leaving`.
"""
