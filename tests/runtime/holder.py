"""What a checkpoint takes for a model: a state that is read and replaced whole."""

from __future__ import annotations

from typing import Any


class Holder:
    """What has `state_dict` and `load_state_dict`."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
