"""Where the machines of a run meet: torch's rendezvous (c10d), which no machine closes for the others because it failed to meet them.

A machine that has joined waits for the others to say where they are. When one of them goes in that moment, torch's agent gives up and
closes the meeting for good, so that whoever comes back is turned away. Here it is closed when the run has ended alone, and whoever gave
up may join again (`launch.run_script` does).
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

BACKEND = "autoparallel"
# Until a machine that has joined and says nothing counts as gone, seconds. Kind: that of torch's keep-alive: three beats of five.
SILENT_S = 15.0


class Meeting(RendezvousHandler):
    """torch's handler, except for who may close it."""

    def __init__(self, inner: DynamicRendezvousHandler) -> None:
        self._inner = inner

    def get_backend(self) -> str:
        """Its name in torch's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """See torch's."""
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch's."""
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        """See torch's."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See torch's."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See torch's."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See torch's."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """The agent ends: for all, unless it is because it did not meet the others. Then this machine falls silent."""
        if not isinstance(sys.exc_info()[1], dist.DistError):
            return self._inner.shutdown()
        self._inner._stop_heartbeats()
        return True


def _meeting(given: RendezvousParameters) -> Meeting:
    backend, store = create_backend(given)
    store.set_timeout(timedelta(seconds=SILENT_S))
    return Meeting(create_handler(store, backend, given))


rendezvous_handler_registry.register(BACKEND, _meeting)
