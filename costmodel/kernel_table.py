"""Tables of measured kernels: what a machine's own benchmarks say of it, as rows of a CSV.

| column | meaning |
|---|---|
| `op` | `matmul`, `group_matmul`, `sdp_fwd`, `sdp_bwd` (causal flash attention), or `memory.KIND` |
| `m`, `n`, `k`, `batch` | of a product; of a grouped one `batch` experts with `m` rows each |
| `accumulate`, `out_dtype` | whether a product adds to its result, and the result's dtype |
| `shape_key` | further `name=value` pairs: an attention's `batch, seq_len, head_num, kv_head_num, qk_head_dim, v_head_dim`, a grouped product's `stage` and `main_grad_dtype`, `bytes` of a memory-bound kernel, `dtype` |
| `achieved_tflops`, or `seconds` | how fast it ran. FLOPs of attention count the whole score matrix |
| `efficiency`, `peak_tflops` | the same as a share of the peak, where neither of the two is there |
| `origin` | where the row was measured |
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from autoparallel.costmodel.fit import Sample
from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import OPERAND_BYTES
from autoparallel.costmodel.program import AttentionShape, Kernel
from autoparallel.errors import UserError
from autoparallel.profiles.constants import MEMORY_KINDS
from autoparallel.profiles.csv_rows import read_csv_rows

OPS = ("matmul", "group_matmul", "sdp_fwd", "sdp_bwd", *(f"memory.{kind}" for kind in MEMORY_KINDS))
COLUMNS = (
    "gpu", "op", "shape_key", "m", "n", "k", "batch", "layout", "accumulate", "out_dtype", "peak_tflops", "efficiency",
    "achieved_tflops", "seconds", "origin", "verified",
)  # fmt: skip
_SIDES = {"sdp_fwd": "attention.forward", "sdp_bwd": "attention.backward"}
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One measured kernel: what the cost model prices it as, and its seconds."""

    gpu: str
    op: str
    kernel: Kernel
    seconds: float
    origin: str

    @property
    def sample(self) -> Sample:
        """As the fits of a device take it."""
        dtype = self.kernel.dtype
        families = {"matmul": f"gemm.{dtype}", "group_matmul": f"grouped.{dtype}", **_SIDES}
        label = f"{self.op} of {self.origin}"
        return Sample(
            family=families.get(self.op, self.op), label=label, kernels=(self.kernel,), seconds=self.seconds
        )


def read_kernel_table(path: Path) -> tuple[KernelRow, ...]:
    """Every row of a table. Raises UserError, naming row and column."""
    says = f"a header with `op` and a row for each kernel; columns: {', '.join(COLUMNS)}"
    return tuple(parse_kernel_row(row, where) for where, row in read_csv_rows(path, COLUMNS, ("op",), says))


def parse_kernel_row(row: Row, where: str = "row") -> KernelRow:
    """A row of a table. Raises UserError, naming the column."""
    op = row.get("op", "")
    if op not in OPS:
        raise UserError(f"{where}: `op` = {op!r}; one of {', '.join(OPS)}")
    fields = dict(re.findall(r"(\w+)=([^,\s]+)", row.get("shape_key") or ""))
    dtype = fields.get("dtype", "bf16")
    if dtype not in OPERAND_BYTES:
        raise UserError(f"{where}: `shape_key` has dtype={dtype}; one of {', '.join(OPERAND_BYTES)}")
    if op.startswith("sdp"):
        kernel = _attention(row, fields, dtype, where)
    elif op.startswith("memory."):
        kernel = Kernel(
            kind=_kind(op), dtype=dtype, flops=0, bytes_moved=_whole(fields, "bytes", where, "shape_key ")
        )
    else:
        kernel = _product(row, fields, dtype, where)
    return KernelRow(
        gpu=row.get("gpu", ""), op=op, kernel=kernel, seconds=_seconds(row, kernel, where), origin=row.get("origin", "")
    )  # fmt: skip


def _kind(op: str) -> OpKind | str:
    name = op.removeprefix("memory.")
    return OpKind(name) if name in set(OpKind) else name


def _product(row: Row, fields: Row, dtype: str, where: str) -> Kernel:
    """A dense or grouped product; bytes: operands in their dtype, the result in its own, twice if accumulated."""
    batch, m, n, k = (_whole(row, key, where) for key in ("batch", "m", "n", "k"))
    out_dtype = row.get("out_dtype") or "bf16"
    if row["op"] == "group_matmul":
        if fields.get("stage") == "bwd_grad_act":
            n, k = k, n
        elif fields.get("stage") == "bwd_grad_w":
            m, n, k = n, k, m
            out_dtype = fields.get("main_grad_dtype", "fp32")
    result = m * n * (4 if out_dtype == "fp32" else 2) * (2 if row.get("accumulate") == "True" else 1)
    return Kernel(
        kind=OpKind.GROUPED_GEMM if row["op"] == "group_matmul" else OpKind.GEMM,
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes_moved=round(batch * (OPERAND_BYTES[dtype] * (m * k + k * n) + result)),
        product=(batch, m, n, k),
    )


def _attention(row: Row, fields: Row, dtype: str, where: str) -> Kernel:
    """A causal flash attention; `flops` counts the whole score matrix, as published efficiencies do."""
    names = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    batch, length, heads, kv_heads, d, v = (_whole(fields, key, where, "shape_key ") for key in names)
    backward = row["op"] == "sdp_bwd"
    tensors = batch * length * (heads * (d + v) + kv_heads * (d + v))
    return Kernel(
        kind=OpKind.ATTENTION,
        dtype=dtype,
        flops=2 * batch * heads * length * length * ((3 * d + 2 * v) if backward else (d + v)),
        bytes_moved=2 * tensors * (2 if backward else 1),
        attention=AttentionShape(
            batch=batch, heads=heads, kv_heads=kv_heads, query_length=length, key_length=length,
            head_size=d, value_size=v, causal=True, flash=True,
        ),
        backward=backward,
    )  # fmt: skip


def _whole(row: Row, key: str, where: str, inside: str = "") -> int:
    text = row.get(key) or ""
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{where}: `{inside}{key}` = {text!r} must be a whole number of at least 1")
    return int(text)


def _seconds(row: Row, kernel: Kernel, where: str) -> float:
    """From the first of `seconds`, `achieved_tflops`, `efficiency` x `peak_tflops` that is there."""
    if row.get("seconds"):
        return _positive(row, "seconds", where)
    if not kernel.flops:
        raise UserError(f"{where}: a memory-bound kernel needs `seconds`")
    if row.get("achieved_tflops"):
        return kernel.flops / (_positive(row, "achieved_tflops", where) * 1e12)
    share, peak = _positive(row, "efficiency", where), _positive(row, "peak_tflops", where)
    return kernel.flops / (share * peak * 1e12)


def _positive(row: Row, key: str, where: str) -> float:
    try:
        value = float(row.get(key) or "")
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise UserError(f"{where}: `{key}` = {row.get(key)!r} must be a number above 0")
    return value


def kernel_table(samples: Sequence[Sample], gpu: str, origin: str) -> str:
    """Measured samples as the text of a table; what no row can say (several kernels, convolutions, launches) is left out."""
    out = StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for sample in samples:
        if len(sample.kernels) == 1 and (cells := _cells(sample.kernels[0])):
            writer.writerow(
                {"gpu": gpu, "origin": origin, "seconds": f"{sample.seconds:.6g}", "verified": "yes", **cells}
            )
    return out.getvalue()


def _cells(kernel: Kernel) -> dict[str, str]:
    """The cells that say what a kernel is; none where no row can."""
    if kernel.count != 1:
        return {}
    shape = kernel.attention
    if kernel.kind == OpKind.ATTENTION and shape is not None:
        if not (shape.flash and shape.causal and shape.query_length == shape.key_length) or shape.generation:
            return {}
        said = (
            f"batch={shape.batch}, seq_len={shape.query_length}, head_num={shape.heads}, kv_head_num={shape.kv_heads}, "
            f"qk_head_dim={shape.head_size}, v_head_dim={shape.value_size}, dtype={kernel.dtype}"
        )
        return {"op": "sdp_bwd" if kernel.backward else "sdp_fwd", "shape_key": said}
    if kernel.kind == OpKind.GEMM and kernel.product is not None:
        batch, m, n, k = kernel.product
        cells = {"batch": batch, "m": m, "n": n, "k": k}
        out = "fp32" if kernel.dtype in ("fp32", "tf32") else "bf16"
        found = {key: str(value) for key, value in cells.items()}
        return {
            "op": "matmul",
            **found,
            "accumulate": "False",
            "out_dtype": out,
            "shape_key": f"dtype={kernel.dtype}",
        }
    if f"memory.{kernel.kind}" in OPS:
        return {
            "op": f"memory.{kernel.kind}",
            "shape_key": f"bytes={kernel.bytes_moved}, dtype={kernel.dtype}",
        }
    return {}
