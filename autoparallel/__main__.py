"""`python -m autoparallel`, and the `autoparallel` script."""

from __future__ import annotations

import os


def main() -> None:
    """The command line; Ctrl-C while it is still being imported is no traceback either."""
    try:
        from autoparallel.cli import main as run
    except KeyboardInterrupt:
        os.write(2, b"interrupted; nothing was written\n")
        os._exit(130)  # 128 + SIGINT, as autoparallel.cli_errors.INTERRUPTED, which is not there yet
    run()


if __name__ == "__main__":
    main()
