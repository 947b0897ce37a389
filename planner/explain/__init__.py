"""From an ended search to an answer.

- `outcome.py`: what a search hands back, a plan or why there is none.
- `result.py`: the plan, priced whole and looked over by a checker without a solver (`check.py`); of equally good ones
  the simplest (`simplest.py`).
- `alternatives.py`, `reasons.py`, `tradeoffs.py`: its rivals, why they lost, and what less memory or fewer devices cost.
- `constraints.py`: what each constraint costs.
- `explain.py`, `relaxations.py`: where nothing fits, what binds and what would help.
"""
