"""The planner's answer alone: what else there is, which takes most of the time for a small problem, is for tests of that to ask for."""

from __future__ import annotations

from functools import partial

from autoparallel.planner import plan as planner

plan = partial(planner.plan, rivals=False)
