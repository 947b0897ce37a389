"""What a chunk needs, by number: the quantities of a stage problem."""

from __future__ import annotations

from enum import IntEnum


class Q(IntEnum):
    """The quantities of a chunk: seconds of its actions, then bytes."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    LAST_BACKWARD = 4
    LAST_BACKWARD_WEIGHT = 5
    END = 6  # the last backward and what is then left of the reduction
    END_WEIGHT = 7  # likewise the last weight gradients
    STEP = 8
    SEND = 9
    TIED = 10  # the exchange of gradients of tied tensors
    STATE = 11
    SAVED = 12
    WEIGHT_SAVED = 13
    FORWARD_PEAK = 14
    BACKWARD_PEAK = 15
    WEIGHT_PEAK = 16
    HOST_STATE = 17  # in the memory of the host: of the optimizer, and of one micro-batch
    HOST_SAVED = 18
