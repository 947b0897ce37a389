"""Seconds that a kernel takes on a device, and that the host takes to launch it.

    device time = start + max(compute, memory) + exposed * min(compute, memory)

The host runs ahead of the device, so a pass takes the longer of what its kernels take and what their launches
take (costmodel/price.py): many small kernels cost what the host needs to send them.
Every constant is a key of `Device.constants`, documented in profiles/constants.py, with kind and source in
the architecture's file. Sources of the forms: docs/cost-model.md#kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import AttentionShape, Kernel
from autoparallel.errors import UserError
from autoparallel.profiles.constants import TILES
from autoparallel.profiles.hardware import Device

# Execution dtypes by torch's names for the tensors they compute on.
DTYPE_ALIASES = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "complex64": "fp32", "complex128": "fp64",
}  # fmt: skip
OPERAND_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.03125, "nvfp4": 0.5625,
}  # fmt: skip
_TILE_SHAPES = tuple(
    (int(rows), int(columns), f"gemm.tile.{rows}x{columns}")
    for rows, columns in (t.split("x") for t in TILES)
)
_SPLITS = (1, 2, 4, 8)
# A convolution's gradient of a few weights is summed over all places of all images.
_CONV_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
# Batched products of heads whose rows are not aligned run without matrix units. Source: NVIDIA, "Matrix multiplication
# background user's guide", table of tensor-core requirements; BigScience's chronicles measured what it costs.
_ALIGNMENT_BYTES = 16
PER_TENSOR = (
    "optimizer_tensors"  # what an optimizer step takes for each of `count` tensors, whatever its size
)
PIECES = "pieces"  # copies of the pieces of a tensor, which the host launches one by one from Python
DTENSOR = "dtensor"  # what the host adds to the launches of `count` eager operators that DTensor dispatches
HOST_COPY = "host"  # a copy between the device's memory and its host's
SERVED = (
    "served"  # rows that a parameter server on a host gives or takes, while every device of the node asks it
)
HOST_UPDATE = "host_update"  # this device's share of what the processors of its host read and write
FROM_DISK = "from_disk"  # rows that a server has on disk, while every device of the node asks for such
_MASK_BYTES = 1  # an element of a dropout mask
_SCORE_KERNELS = {"eager": 4, "fused": 1, "compiled": 2}  # that pass over the scores of unfused attention
_MEMORY_KINDS = {
    OpKind.EMBEDDING: "memory.efficiency.embedding", OpKind.NORM: "memory.efficiency.norm",
    OpKind.BATCH_NORM: "memory.efficiency.batch_norm", OpKind.POOL: "memory.efficiency.pool",
    OpKind.SOFTMAX: "memory.efficiency.softmax", OpKind.CROSS_ENTROPY: "memory.efficiency.cross_entropy",
    OpKind.DROPOUT: "memory.efficiency.dropout", OpKind.ELEMENTWISE: "memory.efficiency.elementwise",
    OpKind.REDUCTION: "memory.efficiency.reduction", OpKind.COPY: "memory.efficiency.copy",
    "optimizer": "memory.efficiency.optimizer", "compress": "memory.efficiency.compress",
}  # fmt: skip


def kernel_s(kernel: Kernel, device: Device, kernels: str) -> float:
    """Seconds of all `kernel.count` launches of a kernel alone: the device's time or the host's, the longer.

    `kernels` is how the model runs: eager, fused or compiled. Views cost nothing. Raises UserError where the
    device cannot compute in the kernel's dtype.
    """
    return max(device_s(kernel, device, kernels), host_s(kernel, device, kernels))


def host_s(kernel: Kernel, device: Device, kernels: str) -> float:
    """Seconds that the host needs to launch the kernel; it runs ahead while the device computes. `fused` kernels launch
    a grouped product expert by expert (Transformer Engine's GroupedLinear: a loop over cuBLAS calls and casts)."""
    if kernel.kind == OpKind.GROUPED_GEMM and kernel.product is not None and kernels == "fused":
        return kernel.count * kernel.product[0] * device.constants["launch_s.expert"]
    if kernel.kind == DTENSOR:
        return kernel.count * device.constants["launch_s.dtensor"]
    by = "compiled" if kernel.in_library else kernels  # no Python between them, in both
    return launches(kernel, kernels) * device.constants[f"launch_s.{by}"]


def runs_ahead(device: Device) -> bool:
    """Whether the device computes while its host launches further kernels; a CPU does both in turn."""
    return device.constants["launch_s.eager"] > 0.0


def launches(kernel: Kernel, kernels: str) -> int:
    """Launches: one each, but for unfused attention its products and the passes over its scores."""
    if kernel.kind in (OpKind.VIEW, PER_TENSOR, PIECES, DTENSOR):
        return 0
    if kernel.kind == OpKind.ATTENTION and kernel.attention is not None and not kernel.attention.flash:
        over_scores = _SCORE_KERNELS[kernels] + (kernel.attention.dropout and kernels == "fused")
        return kernel.count * ((4 if kernel.backward else 2) + over_scores)
    return kernel.count


def device_s(kernel: Kernel, device: Device, kernels: str) -> float:
    """Seconds of the device for all `kernel.count` launches, the host far ahead."""
    if kernel.kind == OpKind.VIEW or kernel.count == 0:
        return 0.0
    if kernel.kind == DTENSOR:  # a CPU launches and computes in turn
        return 0.0 if runs_ahead(device) else host_s(kernel, device, kernels)
    if kernel.kind == PER_TENSOR:
        return kernel.count * device.constants["optimizer.tensor_s"]
    if kernel.kind == PIECES:  # the device waits for each
        copied_s = memory_s(kernel.bytes_moved, device, _MEMORY_KINDS[OpKind.COPY])
        return kernel.count * max(copied_s, device.constants["launch_s.eager"])
    start_s = device.constants["kernel.start_s"]
    if kernel.kind == HOST_COPY:
        return kernel.count * (start_s + kernel.bytes_moved / host_copy_bytes_per_s(device))
    if kernel.kind in (SERVED, HOST_UPDATE, FROM_DISK):
        return kernel.count * (start_s + on_host_s(kernel, device))
    if kernel.kind == OpKind.ATTENTION and kernel.attention is not None:
        if not kernel.attention.flash:
            return kernel.count * unfused_attention_s(kernel, kernel.attention, device, kernels)
        once_s = flash_attention_s(kernel, kernel.attention, device)
    elif kernel.product is not None and kernel.kind in (OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONV):
        once_s = gemm_s(kernel, device)
        # A processor has one kind of unit; experts' products are one launch, or one each.
        if device.constants["gemm.units"] > 1 and kernel.kind != OpKind.GROUPED_GEMM:
            once_s = min(once_s, direct_s(kernel, device))
    elif kernel.kind in _MEMORY_KINDS:
        once_s = memory_s(kernel.bytes_moved, device, _MEMORY_KINDS[kernel.kind])
    elif kernel.kind == OpKind.RECURRENT:
        once_s = chunked_s(kernel, device)
    else:
        once_s = _plain_roofline_s(kernel, device)
    return kernel.count * (start_s + once_s)


def host_copy_bytes_per_s(device: Device) -> float:
    """A copy between a device and its host: the device's own link, or its part of the host's memory, which all devices of
    a box use at once."""
    shared = device.constants["host.memory_bytes_per_s"] / device.devices_per_node
    link = device.constants["host.bytes_per_s"]
    return min(link, shared) if shared else link


def on_host_s(kernel: Kernel, device: Device) -> float:
    """A call of the host, which the device waits for, then rows through the host's memory, which the node's devices use
    at once, and over a device's own link to it, whichever is slower; an update stays in the host's memory. Raises UserError where the device's profile does not
    say what the host has."""
    if kernel.kind == FROM_DISK:
        return kernel.bytes_moved * kernel.sharers / _disk_bytes_per_s(device)
    memory_bytes_per_s = device.constants["host.memory_bytes_per_s"]
    if not memory_bytes_per_s:
        raise UserError(
            f"{device.name}: the profile does not say how fast the host's memory is, which parameter servers need; "
            "set constants.host.memory_bytes and constants.host.memory_bytes_per_s"
        )
    shared_s = kernel.bytes_moved * kernel.sharers / memory_bytes_per_s
    if kernel.kind == HOST_UPDATE:
        return shared_s
    link_s = kernel.bytes_moved / device.constants["host.bytes_per_s"]
    return device.constants["collective.host_s"] + max(shared_s, link_s)


def _disk_bytes_per_s(device: Device) -> float:
    found = device.constants["host.disk_bytes_per_s"]
    if not found:
        raise UserError(
            f"{device.name}: the profile does not say how fast the host's disk is, which servers.memory < 1 needs; set "
            "constants.host.disk_bytes_per_s"
        )
    return found


def nearest_dtype(device: Device, dtype: str) -> str:
    """What to compute in on a device that does not know a dtype: the fastest of the narrowest that are as wide."""
    width = OPERAND_BYTES[DTYPE_ALIASES.get(dtype, dtype)]
    known = device.peak_flops
    return min(known, key=lambda d: (OPERAND_BYTES[d] < width, OPERAND_BYTES[d], -known[d]))


def computes(device: Device, dtype: str) -> bool:
    """Whether a device has matrix products in an execution dtype."""
    return DTYPE_ALIASES.get(dtype, dtype) in device.peak_flops


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak of an execution dtype, FLOP/s."""
    peak = device.peak_flops.get(DTYPE_ALIASES.get(dtype, dtype))
    if peak is None:
        raise UserError(
            f"{device.name} does not compute in {dtype}; execution.dtype can be {', '.join(device.peak_flops)}: "
            f"--set execution.dtype={nearest_dtype(device, dtype)}"
        )
    return peak


def memory_s(bytes_moved: float, device: Device, efficiency_key: str) -> float:
    """(bytes + ramp) / (bandwidth * efficiency): half the bandwidth at `memory.ramp_bytes`."""
    bandwidth = device.hbm_bytes_per_s * device.constants[efficiency_key]
    return (bytes_moved + device.constants["memory.ramp_bytes"]) / bandwidth


def gemm_s(kernel: Kernel, device: Device) -> float:
    """A (batched, grouped, convolution's implicit) matrix product of sizes batch, m, n, k, less the start.

    A chip that its power limits runs products of around `gemm.boost_s` and less faster, by up to
    `gemm.boost`. Experts are launched one by one where `gemm.grouped_expert_s` is not 0.
    """
    assert kernel.product is not None
    constants = device.constants
    dtype = DTYPE_ALIASES.get(kernel.dtype, kernel.dtype)
    batch, m, n, k = kernel.product
    peak = peak_flops(device, dtype) * constants[_efficiency_key(dtype)]
    launching_s = 0.0
    if kernel.kind == OpKind.GROUPED_GEMM:
        peak *= constants["gemm.grouped_efficiency"]
        launching_s = batch * constants["gemm.grouped_expert_s"]
    elif kernel.kind == OpKind.CONV:
        peak *= constants["gemm.conv_efficiency"]
    ideal_s = 2.0 * batch * m * n * k / peak
    short_s = constants["gemm.boost_s"]
    peak *= 1.0 + constants["gemm.boost"] * short_s / (short_s + ideal_s)
    splits = _SPLITS if kernel.kind != OpKind.CONV else _CONV_SPLITS
    compute_s = tiled_s(batch, m, n, k, peak, OPERAND_BYTES[dtype], constants, splits)
    bandwidth = device.hbm_bytes_per_s * constants["gemm.memory_efficiency"]
    memory = kernel.bytes_moved / bandwidth
    on_device_s = _overlapped(compute_s, memory, constants) + _quantise_s(dtype, batch * k * (m + n), device)
    return max(on_device_s, launching_s)


def tiled_s(
    batch: int,
    m: int,
    n: int,
    k: int,
    flops_per_s: float,
    operand_bytes: float,
    constants: Mapping[str, float],
    splits: Sequence[int] = _SPLITS,
) -> float:
    """The best tile's time: output tiles dealt to the compute units in waves, each k + fill long.

    tiles = batch * ceil(m/tm) * ceil(n/tn) * split; waves = tiles/units, rounded up by `gemm.wave_share` of
    the missing part of the last wave, since a part-filled wave runs at higher clocks and bandwidth. Where
    tiles are too few, k is split. A tile of size (tm, tn) takes 2 tm tn (k/split + fill) / (rate * tile
    efficiency). One unit (a processor's core) has no waves, and its kernels for the rest of a tile lose nothing.
    """
    units = constants["gemm.units"]
    unit_flops_per_s = flops_per_s / units
    share = constants["gemm.wave_share"]
    fill = constants["gemm.fill_k_bytes"] / operand_bytes
    if units == 1:
        return 2 * batch * m * n * (k + fill) / flops_per_s
    best = float("inf")
    for rows, columns, key in _TILE_SHAPES:
        tile_rate = unit_flops_per_s * constants[key]
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in splits:
            full = tiles * split / units
            waves = full + share * (ceil(full) - full) if full > 1 else 1.0
            best = min(best, waves * 2 * rows * columns * (k / split + fill) / tile_rate)
            if tiles * split >= units:
                break
    return best


def flash_attention_s(kernel: Kernel, shape: AttentionShape, device: Device) -> float:
    """One fused attention kernel: max(longest tile, work + tail * longest tile), or its memory traffic.

    FLOPs forward 2 b h s t (d + v), backward 2 b h s t (3 d + 2 v); a causal mask leaves (t + tile) / 2t of
    them, or (2t - s + tile) / 2t of the last s queries of the sequence. Tiles of queries are dealt to the compute units; at the end some wait for the longest, which under
    a causal mask runs over all keys.
    """
    constants = device.constants
    side = "backward" if kernel.backward else "forward"
    d, v = shape.head_size, shape.value_size
    flops_per_pair = 2.0 * ((3 * d + 2 * v) if kernel.backward else (d + v))
    # The first generation is as fast with heads of 64 as with 128 (FlashAttention-2, arXiv:2307.08691, figure 5).
    fill = 0.0 if shape.generation == 1 else constants["attention.head_fill"]
    head_share = min(1.0, d / (d + fill) * (128 + fill) / 128)
    if d > 128:
        head_share *= constants[f"attention.large_head_{side}"]
    rate = peak_flops(device, _attention_dtype(kernel.dtype)) * constants[f"attention.{side}"] * head_share
    if shape.generation:
        rate *= constants[f"attention.v{shape.generation}"]
    tile = min(constants[f"attention.tile_{side}"], shape.query_length)
    keys = float(shape.key_length)
    before = keys - shape.query_length if shape.last else 0.0  # keys that every query sees
    seen = before + (keys - before + tile) / 2 if shape.causal else keys
    work_s = shape.batch * shape.heads * shape.query_length * seen * flops_per_pair / rate
    longest_s = tile * keys * flops_per_pair / (rate / constants["gemm.units"])
    compute_s = max(longest_s, work_s + constants[f"attention.tail_{side}"] * longest_s)
    memory = kernel.bytes_moved / (device.hbm_bytes_per_s * constants["gemm.memory_efficiency"])
    return max(compute_s, memory)


def unfused_attention_s(kernel: Kernel, shape: AttentionShape, device: Device, kernels: str) -> float:
    """softmax(Q K^T) V with the scores in memory: batched products, and passes over the scores.

    Products forward: scores, output; backward: two for each. The mask saves nothing. Beside the one kernel that scales,
    masks and normalises stands the dropout's, which reads and writes the probabilities and writes (or reads) a mask.
    """
    constants = device.constants
    dtype = _attention_dtype(kernel.dtype)
    total = 0.0
    start_s = constants["kernel.start_s"]
    item = OPERAND_BYTES[dtype]
    aligned = shape.head_size * item % _ALIGNMENT_BYTES == 0
    for batch, m, n, k in _products(kernel, shape):
        moved = int(batch * (m * k + k * n + m * n) * item)
        part = Kernel(
            kind=OpKind.GEMM,
            dtype=dtype,
            flops=2 * batch * m * n * k,
            bytes_moved=moved,
            product=(batch, m, n, k),
        )
        total += start_s + (gemm_s(part, device) if aligned else _vector_product_s(part, device))
    side = "backward" if kernel.backward else "forward"
    passes = constants[f"attention.score_passes_{side}.{kernels}"]
    if shape.dropout and kernels == "fused":
        passes += 2 + _MASK_BYTES / item
    scores = shape.batch * shape.heads * shape.query_length * shape.key_length * item * passes
    return total + start_s + memory_s(scores, device, "memory.efficiency.softmax")


def _vector_product_s(kernel: Kernel, device: Device) -> float:
    """A product that the matrix units cannot run: its rows do not start on multiples of `_ALIGNMENT_BYTES`."""
    rate = peak_flops(device, "fp32") * device.constants["gemm.efficiency.full"]
    return max(kernel.flops / rate, memory_s(kernel.bytes_moved, device, "memory.efficiency.elementwise"))


def _products(kernel: Kernel, shape: AttentionShape) -> tuple[tuple[int, int, int, int], ...]:
    """The batched products (batch, m, n, k) of unfused attention: two forward, two for each of them backward."""
    b, s, t = shape.batch * shape.heads, shape.query_length, shape.key_length
    d, v = shape.head_size, shape.value_size
    if kernel.backward:
        return (b, s, t, v), (b, t, v, s), (b, s, d, t), (b, t, d, s)
    return (b, s, t, d), (b, s, v, t)


def _plain_roofline_s(kernel: Kernel, device: Device) -> float:
    """Kernels of which only FLOPs and bytes are known."""
    if not kernel.flops:
        return memory_s(kernel.bytes_moved, device, "memory.efficiency.elementwise")
    dtype = DTYPE_ALIASES.get(kernel.dtype, kernel.dtype)
    return _roofline_s(kernel, device, peak_flops(device, dtype) * device.constants[_efficiency_key(dtype)])


def _roofline_s(kernel: Kernel, device: Device, flops_per_s: float) -> float:
    """A kernel's FLOPs at a rate, or its memory traffic."""
    traffic_s = memory_s(kernel.bytes_moved, device, "memory.efficiency.elementwise")
    return max(kernel.flops / flops_per_s, traffic_s)


def direct_s(kernel: Kernel, device: Device) -> float:
    """A product on the vector units, which do not mind how few rows, columns or terms it has: of each channel by itself, say."""
    peak = min(peak_flops(device, "fp32"), peak_flops(device, kernel.dtype))
    return _roofline_s(kernel, device, peak * device.constants["gemm.direct_efficiency"])


def chunked_s(kernel: Kernel, device: Device) -> float:
    """One kernel that goes over a sequence in chunks: small products between exponentials and sums, which the vector units
    hold up, or its memory traffic."""
    peak = peak_flops(device, "fp32")
    return _roofline_s(kernel, device, peak * device.constants["chunked.efficiency"])


def _overlapped(compute_s: float, memory: float, constants: Mapping[str, float]) -> float:
    """The longer of the two, and the share of the shorter that it does not hide."""
    return max(compute_s, memory) + constants["gemm.exposed"] * min(compute_s, memory)


def _quantise_s(dtype: str, operand_elements: float, device: Device) -> float:
    """Casting and scaling the operands of 8- and 4-bit products, averaged over a layer's three products."""
    key = f"gemm.quantise_bytes.{dtype}"
    if key not in device.constants:
        return 0.0
    bandwidth = device.hbm_bytes_per_s * device.constants["memory.efficiency.elementwise"]
    return operand_elements * device.constants[key] / bandwidth


def _efficiency_key(dtype: str) -> str:
    if dtype in ("bf16", "fp16"):
        return "gemm.efficiency.half"
    if dtype in ("fp8", "mxfp8"):
        return "gemm.efficiency.fp8"
    return "gemm.efficiency.nvfp4" if dtype == "nvfp4" else "gemm.efficiency.full"


def _attention_dtype(dtype: str) -> str:
    """Attention runs in 16 bits where products run in fewer."""
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    return "bf16" if dtype in ("fp8", "mxfp8", "nvfp4") else dtype
