"""`Prediction`: what the cost model says of one program; the source of `--json` and of the report."""

from __future__ import annotations

from dataclasses import dataclass

BREAKDOWN_KEYS = (
    "forward", "backward", "recompute", "tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "host_copies",
    "bubble", "optimizer", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one device of a pipeline rank, live tensors; `peak` is their largest sum over the step."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action on the timeline of a pipeline rank."""

    rank: int
    action: str  # "2F0"
    start_s: float
    end_s: float
    label: str  # breakdown key


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a step needs of the memory of the devices and of their hosts, and what these can hold."""

    memory: tuple[StageMemory, ...]  # by pipeline rank
    capacities_bytes: tuple[float, ...]  # by pipeline rank: device memory less its reserve
    host_bytes: int = 0  # in the fullest host's memory: what is offloaded, and what parameter servers hold
    host_capacity_bytes: float = 0.0  # of the memory of each node's host; 0: not stated

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest device."""
        return max(stage.peak for stage in self.memory)

    @property
    def lacking_bytes(self) -> tuple[float, ...]:
        """Bytes too many on each pipeline rank; negative where there is room."""
        return tuple(s.peak - room for s, room in zip(self.memory, self.capacities_bytes, strict=True))

    @property
    def excess_bytes(self) -> float:
        """Bytes too many on the pipeline rank with the least room; negative where every rank has room."""
        return max(self.lacking_bytes)

    @property
    def host_excess_bytes(self) -> float:
        """Bytes too many in the memory of a node's host; negative where there is room, 0 where nobody knows."""
        return self.host_bytes - self.host_capacity_bytes if self.host_capacity_bytes else 0.0

    @property
    def capacity_bytes(self) -> float:
        """What the devices of the pipeline rank with the least room can hold."""
        lacking = self.lacking_bytes
        return self.capacities_bytes[lacking.index(max(lacking))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Held):
    """Seconds, bytes and where they go. `breakdown_s` sums to `step_time_s`."""

    step_time_s: float
    breakdown_s: tuple[tuple[str, float], ...]  # in the order of BREAKDOWN_KEYS, of the critical rank
    model_flops: int  # per step, whole model
    hardware_flops: int  # with recomputation
    tokens: int  # per step
    devices: int
    peak_flops_per_s: float  # of one device in the compute dtype, the mean of unlike devices

    @property
    def feasible(self) -> bool:
        return self.excess_bytes <= 0 and self.host_excess_bytes <= 0

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.step_time_s / self.devices

    @property
    def model_flops_per_s_per_device(self) -> float:
        return self.model_flops / self.step_time_s / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation against the dense peak of the compute dtype, 0 to 1."""
        return self.model_flops_per_s_per_device / self.peak_flops_per_s
