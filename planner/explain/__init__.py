"""From an ended search to an answer.

- `result.py`: the plan, priced whole and looked over by a checker without a solver.
- `choice.py`: of plans that a prediction cannot tell apart, which one a careful engineer would sign; `simplest.py`: what of a
  plan makes it no better is left out.
- `alternatives.py`, `reasons.py`, `tradeoffs.py`: its rivals, why they lost, and what less memory or fewer devices cost.
- `break_even.py`: from which bandwidth on compressing gradients pays.
- `constraints.py`: what each constraint costs.
- `infeasible.py`, `relaxations.py`: where nothing fits, what binds and what would help.
"""
