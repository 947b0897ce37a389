"""What finds out that a run has gone wrong, and who is to blame.

- `numbers.py`: losses and gradients that are no numbers.
- `checksums.py`: replicas that are no longer equal.
- `status.py`: what every rank is doing, in files that outlive it.
- `reach.py`: which ranks can connect to which.
- `deadline.py`: ranks that die, hang or disagree: one error on all, naming rank, stage and action.
- `guards.py`: all of these around the steps of a run.

Open to other rooms: `numbers`, `checksums`, `status`, `reach`, `deadline`, `guards`.
"""
