"""The cost model's own constants, by dotted key: the one list of what a device or architecture file may set.

Where a key ends in a name of a class (a kind of kernel, a protocol, a tile) each member is its own key.
"""

from __future__ import annotations

KERNEL_MODES = ("eager", "fused", "compiled")
TILES = ("256x128", "128x256", "128x128", "128x64", "64x128", "64x64")
MEMORY_KINDS = ("elementwise", "norm", "batch_norm", "pool", "softmax", "cross_entropy", "dropout", "embedding", "reduction", "copy", "optimizer", "compress")  # fmt: skip
COMPRESSIONS = ("fp16", "bf16", "fp8", "int8", "int4", "int2", "sign", "topk", "powersgd")
PROTOCOLS = ("simple", "ll128", "ll")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

_SINGLE = {
    "kernel.start_s": "device time from the start of a kernel to its first useful work, and from the last to its end",
    "gemm.units": "compute units that a GEMM's tiles are dealt to (SMs, CUs, cores)",
    "gemm.efficiency.half": "share of the peak in the main loop of the best tile, full waves, endless k: bf16, fp16",
    "gemm.efficiency.full": "likewise tf32, fp32, fp64",
    "gemm.efficiency.fp8": "likewise fp8, mxfp8",
    "gemm.efficiency.nvfp4": "likewise nvfp4",
    "gemm.wave_share": "share of the missing part of a GEMM's last wave that is lost",
    "gemm.exposed": "share of the shorter of compute and memory time that the longer does not hide",
    "gemm.memory_efficiency": "share of memory bandwidth that products and fused attention reach",
    "gemm.quantise_bytes.fp8": "bytes moved per operand element and product to cast and scale, fp8",
    "gemm.quantise_bytes.mxfp8": "likewise mxfp8",
    "gemm.quantise_bytes.nvfp4": "likewise nvfp4",
    "gemm.fill_k_bytes": "bytes of k (one row) that filling and draining a tile's pipeline costs",
    "gemm.grouped_efficiency": "grouped GEMM's main loop relative to a dense GEMM's",
    "gemm.grouped_expert_s": "host time per expert of a grouped GEMM that is launched expert by expert",
    "gemm.boost": "how much faster than sustained a product far shorter than gemm.boost_s runs, as a share",
    "gemm.boost_s": "length of a product at which half of that is left",
    "gemm.direct_efficiency": "share of the fp32 peak of the vector units that products reach there",
    "gemm.conv_efficiency": "a convolution's main loop relative to its implicit GEMM's",
    "attention.forward": "share of the peak of the flash forward kernel, long sequences, head size 128",
    "attention.backward": "likewise backward",
    "attention.head_fill": "head-size elements lost per tile: efficiency is d / (d + fill), relative to d = 128",
    "attention.large_head_forward": "efficiency of head sizes above 128 relative to 128, forward",
    "attention.large_head_backward": "likewise backward",
    "attention.tile_forward": "queries that one compute unit works on at a time, forward",
    "attention.tile_backward": "likewise backward, keys",
    "attention.tail_forward": "share of the longest tile's time that the end of the kernel waits, forward",
    "attention.tail_backward": "likewise backward",
    "optimizer.tensor_s": "host time per parameter tensor of an optimizer step that runs tensor by tensor, kernels = eager",
    "attention.v1": "speed of the first generation of flash kernels (FlashAttention 1, Triton 2022) relative to these",
    "attention.v2": "likewise the second generation (FlashAttention 2, what torch runs unless told otherwise), where the best is newer",
    "memory.ramp_bytes": "bytes at which a memory-bound kernel reaches half its bandwidth, less the start",
    "host.bytes_per_s": "link between a device and its host's memory, each way: what offloading uses",
    "host.memory_bytes": "memory of a node's host, for what is offloaded and for parameter servers; 0: not stated",
    "host.usable": "share of that memory that training can have: the rest is the system's and the data loaders'",
    "host.memory_bytes_per_s": "bandwidth of that memory, of all processors of the node; 0: not stated",
    "host.disk_bytes_per_s": "reads of rows that a parameter server has on disk, whole rows at random; 0: not stated",
    "collective.efficiency_inner": "share of the innermost level's bandwidth that large messages reach",
    "collective.efficiency_outer": "likewise on the other levels",
    "collective.nvls_efficiency": "bus bandwidth of in-switch reduction, as a share of the level's",
    "collective.nvls_rank_s": "time per device on the switch to start an in-switch reduction",
    "collective.tree_efficiency": "bus bandwidth of a tree relative to a ring's",
    "collective.all_to_all_efficiency": "all-to-all's bandwidth relative to a ring's",
    "collective.peer_s": "further start of each peer in an all-to-all",
    "collective.send_efficiency": "point-to-point bandwidth relative to a ring's",
    "chunked.efficiency": "FLOP/s of kernels that go over a sequence in chunks, relative to the fp32 peak of the vector units",
    "collective.in_step_outside": "time of a collective in a training step relative to calls back to back, where its ranks "
    "stand in several units of the innermost level (nodes): they arrive at different moments, and share the network",
    "collective.ramp_bytes": "message at which filling the chunk pipeline doubles the time on the wire",
    "collective.host_s": "host time of a torch.distributed call: the shortest that back-to-back calls take",
    "overlap.compute_slowdown": "further time of computation per second that it runs beside a collective, as a share",
    "overlap.comm_slowdown": "further time of a collective per second that it runs beside computation, as a share",
}  # fmt: skip

CONSTANTS: dict[str, str] = {
    **_SINGLE,
    **{
        f"attention.score_passes_{side}.{mode}": f"reads and writes of unfused scores, {side}, kernels = {mode}"
        for side in ("forward", "backward")
        for mode in KERNEL_MODES
    },
    "launch_s.expert": "host time per expert of a grouped product, its casts with it, kernels = fused",
    "launch_s.dtensor": "further host time per operator that DTensor dispatches, kernels = eager",
    **{f"launch_s.{mode}": f"host time per kernel launch, kernels = {mode}" for mode in KERNEL_MODES},
    **{f"gemm.tile.{tile}": f"main-loop efficiency of a {tile} tile relative to the best" for tile in TILES},
    **{f"memory.efficiency.{kind}": f"share of memory bandwidth, {kind} kernels" for kind in MEMORY_KINDS},
    **{
        f"compress.{method}": f"time of encoding and decoding by {method} relative to its passes over memory"
        for method in COMPRESSIONS
    },
    **{f"collective.start_s.{p}": f"time before the first hop, protocol {p}" for p in PROTOCOLS},
    **{
        f"collective.factor.{op}": f"time of {op} relative to its formula, from how the library does it"
        for op in COLLECTIVES
    },
    **{f"collective.latency.{p}": f"hop latency of protocol {p} relative to the level's" for p in PROTOCOLS},
    **{f"collective.bandwidth.{p}": f"bandwidth of protocol {p} relative to simple" for p in PROTOCOLS},
}

# Constants that times are divided by, besides all with `efficiency` in their key: a device cannot have 0 of them.
DIVISORS = ("gemm.units", "gemm.tile.", "attention.forward", "attention.backward", "attention.large_head_", "attention.v1", "attention.v2", "collective.bandwidth.")  # fmt: skip

UNSTATED = "stated by no file: the default of profiles/constants.py"
# What a constant is where no file sets it: another constant's value, or a number.
UNLESS_SET: dict[str, str | float] = {
    **{f"compress.{method}": 1.0 for method in COMPRESSIONS},  # fused kernels. Kind: formula
    # A device without a peak in such a dtype never asks; one with it whose products nobody measured is as good at them.
    "gemm.efficiency.full": "gemm.efficiency.half",
    "gemm.efficiency.fp8": "gemm.efficiency.half",
    "gemm.efficiency.nvfp4": "gemm.efficiency.fp8",
    # Products too thin for matrix units. Kind: fitted; source: benchmarks/published/vision_rows.csv, 24 models with depthwise convolutions
    # drawn with seed 11.
    "gemm.direct_efficiency": 0.05,
    "gemm.conv_efficiency": 1.0,  # an implicit product. Kind: formula
    "launch_s.expert": "launch_s.fused",
    # Kind: measured, on other hosts. Source: veScale (arXiv:2509.07003), DTensor's dispatch in C++, as torch has it since 2.10.
    "launch_s.dtensor": 30e-6,
    "memory.efficiency.batch_norm": "memory.efficiency.norm",
    "memory.efficiency.pool": "memory.efficiency.reduction",
    "attention.v2": 1.0,
    # Matrix units help with products. Kind: fitted; source: benchmarks/published/chunked_kernels.csv.
    "chunked.efficiency": 1.5,
    "collective.in_step_outside": 1.0,  # as back to back
    "optimizer.tensor_s": 0.0,  # multi-tensor kernels
    "host.memory_bytes": 0.0,  # parameter servers are then refused, and nothing is offloaded unasked
    "host.usable": 0.9,  # kind: estimate
    "host.memory_bytes_per_s": 0.0,
    "host.disk_bytes_per_s": 0.0,  # servers.memory < 1 is then refused
}
