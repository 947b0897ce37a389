"""The end of a process: its groups are left before the interpreter goes.

Gloo's worker threads release the tensors of a collective a moment after it is done. A tensor that Python has seen
takes the interpreter's lock for that; a thread that asks for it while the interpreter shuts down is ended by
pthread_exit inside of C++ code that may not be left so, and the process dies of SIGABRT ("terminate called without
an active exception") after all its work is done. So the threads are given a moment before.

Groups of accelerators wait, at their end, for collectives that are under way. Where an error ends this process its
peers may never take part in them: then the groups are left as they are, so that the launcher sees the process end.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time

import torch.distributed as dist

from autoparallel.runtime.ranks.accelerator import device_of_group

# For worker threads to be scheduled and let go of what they hold, microseconds of work. Kind: chosen.
_SETTLE_S = 0.1


def leave_at_exit(*, destroy: bool) -> None:
    """When the process ends, let the threads of its groups finish; `destroy` the groups if we started them."""
    atexit.unregister(leave)
    atexit.register(leave, destroy=destroy)


def leave(*, destroy: bool) -> None:
    """What is done when the process ends."""
    failed = getattr(sys, "last_value", None) is not None
    if destroy and dist.is_initialized() and not (failed and device_of_group().type != "cpu"):
        dist.destroy_process_group()
    gc.collect()  # groups held by modules in cycles end their threads
    time.sleep(_SETTLE_S)
