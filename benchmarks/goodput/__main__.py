"""`python -m benchmarks.goodput --minutes 10 --cases 3 --seed 1`: prints a JSON object, and says on stderr what is done."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.goodput.cases import POLICIES, compared, draw_case, measured
from benchmarks.goodput.learnt import learn, read_learnt


def main() -> None:
    """Learn, draw, measure, compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of every policy in every case")
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--learnt", type=Path, help="JSON of an earlier run whose figures are taken")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="these alone")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        learnt = read_learnt(given.learnt) if given.learnt else learn(Path(name) / "learnt")
        print(json.dumps(learnt.told()), file=sys.stderr)
        for seed in range(given.seed, given.seed + given.cases):
            case, runs = draw_case(seed, given.minutes), []
            for policy in given.policy or POLICIES:
                runs.append(measured(Path(name) / f"{seed}-{policy}", case, policy, learnt))
                print(
                    json.dumps({"mtbf_s": case.mtbf_s, "replace_s": case.replace_s, **runs[-1]}),
                    file=sys.stderr,
                )
            found.append(compared(case, runs))
    print(json.dumps({"minutes": given.minutes, "learnt": learnt.told(), "cases": found}, indent=2))


if __name__ == "__main__":
    main()
