"""See the package's docstring."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    import benchmarks.one_device as package

    parser = argparse.ArgumentParser(
        description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    draw = parts.add_parser("draw")
    draw.add_argument("--seed", type=int, default=1)
    draw.add_argument("--cases", type=int, default=24)
    draw.add_argument("-o", "--output", type=Path, required=True)
    for name in ("measure", "serve"):
        measure = parts.add_parser(name)
        measure.add_argument("folder", type=Path)
        measure.add_argument("-o", "--output", type=Path, required=True)
        measure.add_argument("--limit-s", type=float, default=3600)
    kernels = parts.add_parser("kernels")
    kernels.add_argument("--seed", type=int, default=1)
    kernels.add_argument("-o", "--output", type=Path, required=True)
    compared = parts.add_parser("compare")
    compared.add_argument("folder", type=Path)
    compared.add_argument("measured", type=Path)
    compared.add_argument("--device", default="h100-sxm", help="a shipped profile or a file")
    compared.add_argument("--rows", action="store_true", help="print every case")
    parts.add_parser("same-numbers")
    given = parser.parse_args()
    if given.part == "draw":
        from benchmarks.one_device.cases import draw_cases, write_cases

        write_cases(given.output, draw_cases(given.seed, given.cases))
    elif given.part == "kernels":
        from benchmarks.one_device.kernels import measure_kernels

        measure_kernels(given.seed, given.output)
    elif given.part == "compare":
        from benchmarks.one_device.compare import page, rows_of

        print(page(rows_of(given.folder, given.measured, given.device), every=given.rows))
    elif given.part == "same-numbers":
        from benchmarks.one_device.same_numbers import compare

        compare()
    else:
        from benchmarks.one_device.steps import measure_all, serve

        (measure_all if given.part == "measure" else serve)(given.folder, given.output, given.limit_s)


if __name__ == "__main__":
    main()
