"""`python -m autoparallel`."""

from __future__ import annotations

from autoparallel.cli import main

main()
