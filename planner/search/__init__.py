"""The search: two halves that share what was simulated; `docs/planner.md` has the formulas.

- `space/`: what there is to choose from, as numpy columns, one row a shape or a variant.
- `bounds/`: what each row can at best reach.
- `partition/`: one candidate's stage problem: layers to pipeline chunks, and how many of them are recomputed.
- `improve/`: the primal half, local search over simulated strategies.
- `dual.py`: the dual half, best bound first, over what is open (`open.py`): shapes, variants of some, candidates.
- `evaluate.py`: complete strategies simulated; `simulations.py`: the incumbent and all that both halves learn from it.
- `driver.py`: lets the two take turns; `spending.py` says what each step costs, for a limit in work, `headway.py` whether more is
  worth while.
- `tensor_plans.py`: other Pareto tensor plans, where they may be worth it.
"""
