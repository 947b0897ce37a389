"""The primal half of the search: good strategies soon, by simulation alone.

- `starts.py`: for each size of pp, tp and cp the variant that promises most.
- `neighbours.py`: shapes that one legal move apart from another; a bound only says in which order they are tried.
- `climb.py`: local search from the best strategies simulated so far, over those moves.
- `partitions.py`: blocks of the incumbent moved from one stage to another, and recomputed or not.
- `details.py`: keys that no bound tells apart (bucket size, algorithm, overlap, shares of offload), tried on the incumbent.
"""
