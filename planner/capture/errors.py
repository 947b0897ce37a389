"""What can go wrong while a model is captured."""

from __future__ import annotations

from autoparallel.errors import UserError


class ModelError(UserError):
    """The model cannot be loaded or called: the path, the name, the arguments or the configuration are wrong."""


class UntraceableError(Exception):
    """A value that only real data has was asked for while the model ran on the meta device."""


class TraceError(Exception):
    """The code of the module at `path` failed while it was traced, or run whole."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path or 'the model'}: {reason}")
        self.path = path
        self.reason = reason
