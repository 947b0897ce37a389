"""What one device sees of a block: local sizes, bytes and kernels under a tensor plan and a dtype policy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoparallel.costmodel.block_index import BlockIndex
from autoparallel.costmodel.graph import ITEM_BYTES, ONCE, KernelSpec, OpKind, TensorSpec
from autoparallel.costmodel.program import AttentionShape, Collective, CollectiveOp, Kernel
from autoparallel.planner.expand.layout import Layout
from autoparallel.planner.sharding.plan import BlockPlan
from autoparallel.planner.strategy.types import Execution

# Execution dtype -> dtype of the tensors: the 8- and 4-bit formats are those of GEMMs only.
TENSOR_DTYPE = {
    "fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16",
    "fp8": "bfloat16", "mxfp8": "bfloat16", "nvfp4": "bfloat16",
}  # fmt: skip
SHORT_DTYPE = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Bytes per element of a quantised GEMM operand, its block scales included. Kind: formula. Source: OCP
# Microscaling Formats 1.0 (one scale byte per 32 elements); NVFP4 (one per 16).
QUANTISED_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
# A quantised operand is written along rows for the forward and along columns for the backward product.
# Kind: formula. Source: Transformer Engine, Float8Tensor row-wise and column-wise data.
QUANTISED_COPIES = 2
GENERATIONS = {"flash-v1": 1, "flash-v2": 2}  # of flash kernels, by `execution.attention`
PRODUCTS = frozenset({OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONV})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that a block's local work depends on, besides the block and its tensor plan."""

    graph_dtype: str
    micro: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    execution: Execution = field(default_factory=Execution)

    @property
    def tensor_dtype(self) -> str:
        """dtype of activations and parameters in compute (torch's name)."""
        return TENSOR_DTYPE[self.execution.dtype]

    @property
    def flash(self) -> bool:
        return self.execution.attention != "unfused"

    def parts(self, placement: str) -> int:
        """Parts into which a placement divides a tensor: "S…" over tp, "E0" over ep."""
        return {"S": self.tp, "E": self.ep}.get(placement[:1], 1)

    @property
    def regathers(self) -> bool:
        """Megatron keeps the sequence shard of a gathered input and gathers it again in the backward pass."""
        return self.execution.kernels == "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBlock:
    """A block on one device of the tensor-parallel group."""

    layout: Layout
    setting: Setting
    index: BlockIndex = field(init=False, repr=False, compare=False)
    plan: BlockPlan = field(init=False, repr=False, compare=False)
    _bytes: dict[tuple[str, str], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", self.layout.index)
        object.__setattr__(self, "plan", self.layout.plan)
        object.__setattr__(self, "_bytes", {})

    def item_bytes(self, dtype: str) -> int:
        s = self.setting
        return ITEM_BYTES[s.tensor_dtype if dtype == s.graph_dtype else dtype]

    def spec_bytes(self, spec: TensorSpec, placement: str) -> int:
        """Local bytes of a tensor; context parallelism splits what scales with the samples."""
        s = self.setting
        scales = any(size.per_sample for size in spec.shape)
        parts = s.parts(placement) * (s.cp if scales else 1)
        return -(-spec.numel(s.micro) * self.item_bytes(spec.dtype) // parts)

    def value_bytes(self, value: str, placement: str) -> int:
        key = (value, placement)
        if key not in self._bytes:
            self._bytes[key] = self.spec_bytes(self.layout.index.specs[value], placement)
        return self._bytes[key]

    def placement(self, op: int, value: str) -> str:
        """As `Layout.placement`."""
        return self.layout.placement(op, value)

    def output_placement(self, value: str) -> str:
        """As `Layout.output_placement`."""
        return self.layout.output_placement(value)

    def letter_parts(self, op: int) -> dict[str, int]:
        """Letter of an operator's labels -> parts it is split into by tensor parallelism."""
        tp = self.setting.tp
        return dict.fromkeys(self.layout.split_letters(op), tp) if tp > 1 else {}

    def expert_parts(self, op: int) -> int:
        """Parts into which ep divides the experts of an operator."""
        sharding = self.plan.shardings[op]
        held = sharding is not None and any(p.startswith("E") for p in sharding.inputs)
        return self.setting.ep if held else 1

    def split(self, op: int) -> int:
        """Parts that an operator without letters is split into."""
        return self.setting.tp if self.layout.is_split(op) else 1

    def kernels(self, op: int, specs: tuple[KernelSpec, ...], *, backward: bool) -> list[Kernel]:
        """Local kernels of an operator's forward or of a part of its backward."""
        if op in self.index.aliases:
            return []
        found: list[Kernel] = []
        for spec in specs:
            kernel = self._kernel(op, spec, backward=backward)
            if spec.count != ONCE:
                steps = self.index.block.operators[op].kind is OpKind.RECURRENT
                kernel = replace(kernel, count=spec.count.at(self.setting.micro), in_library=steps)
            found.append(kernel)
            if kernel.product and kernel.dtype in QUANTISED_BYTES:
                found.append(self._quantise(kernel, spec))
        return found

    def _kernel(self, op: int, spec: KernelSpec, *, backward: bool) -> Kernel:
        s, operator = self.setting, self.index.block.operators[op]
        scale = self.item_bytes(spec.dtype) / ITEM_BYTES[spec.dtype]
        flops, moved = spec.flops.at(s.micro), spec.bytes_moved.at(s.micro) * scale
        dtype = self._arithmetic_dtype(spec)
        if spec.kind is OpKind.ATTENTION and operator.sizes:
            return self._attention(op, flops, moved, dtype, backward=backward)
        if spec.kind in PRODUCTS and spec.product:
            return self._product(op, spec, flops, moved, dtype, backward=backward)
        cp = 1 if operator.kind is OpKind.RECURRENT else s.cp  # which runs on the whole sequence
        division = self.split(op) * cp
        if cp > 1:  # every share of the sequence meets all parameters, or gives their gradients
            moved += min(spec.bytes_moved.const, 2 * self._parameter_bytes(op)) * scale * (cp - 1)
        return Kernel(
            kind=spec.kind, dtype=dtype, flops=flops // division, bytes_moved=round(moved / division),
            backward=backward,
        )  # fmt: skip

    def _parameter_bytes(self, op: int) -> int:
        """Bytes of the parameters that an operator reads, as they were captured."""
        read = [self.index.specs[v] for v in self.index.block.operators[op].inputs if v.startswith("param:")]
        return sum(spec.numel(1) * ITEM_BYTES[spec.dtype] for spec in read)

    def _product(
        self, op: int, spec: KernelSpec, flops: int, moved: float, dtype: str, *, backward: bool
    ) -> Kernel:
        s, parts = self.setting, self.letter_parts(op)
        sizes = dict(self.index.block.operators[op].sizes)
        local = {n: sizes[n].at(s.micro) // parts.get(n, 1) if n in sizes else 1 for n in spec.product}
        sequence = "m" in local and "m" in sizes and sizes["m"].per_sample
        rows = s.cp if sequence else 1  # rows hold the sequence
        if "m" in local:
            local["m"] = max(local["m"] // rows, 1)
        if "e" in local:  # m counts the rows of all experts, which are taken to get equally many
            local["e"] = max(local["e"] // self.expert_parts(op), 1)
            local["m"] = -(-local["m"] // local["e"])
        b, m, n, k = (local[letter] for letter in spec.product)
        division = rows * (s.tp if any(letter in parts for letter in spec.product) else 1)
        if spec.kind is OpKind.CONV:  # the input is not read once per tap
            moved = moved / division
        else:
            item = self.item_bytes(spec.dtype)
            moved = b * ((m * k + k * n) * item + m * n * self._result_bytes(spec, item))
        return Kernel(
            kind=spec.kind, dtype=dtype, flops=flops // division, bytes_moved=round(moved),
            product=(b, m, n, k), backward=backward,
        )  # fmt: skip

    def _result_bytes(self, spec: KernelSpec, item: float) -> float:
        """Bytes moved per element of a product's result: a weight gradient that is added to the sum of the step (Megatron's
        gradient accumulation fusion) reads and writes it."""
        execution = self.setting.execution
        if spec.gradient_of != "weight" or execution.kernels != "fused" or execution.added_gradients:
            return item
        return 2.0 * ITEM_BYTES[TENSOR_DTYPE[execution.grad_dtype]]

    def _arithmetic_dtype(self, spec: KernelSpec) -> str:
        s = self.setting
        if spec.dtype == s.graph_dtype and spec.kind in PRODUCTS:
            return s.execution.dtype
        dtype = s.tensor_dtype if spec.dtype == s.graph_dtype else spec.dtype
        return SHORT_DTYPE.get(dtype, SHORT_DTYPE[s.tensor_dtype])

    def attention_shape(self, op: int) -> AttentionShape:
        """Local shape: heads split by tensor, queries by context parallelism."""
        s, operator, parts = self.setting, self.index.block.operators[op], self.letter_parts(op)
        local = {n: max(size.at(s.micro) // parts.get(n, 1), 1) for n, size in operator.sizes}
        heads = local.get("h", 1)
        return AttentionShape(
            batch=local.get("b", 1), heads=heads, kv_heads=min(local.get("g", heads), heads),
            query_length=max(local.get("s", 1) // s.cp, 1), key_length=local.get("t", local.get("s", 1)),
            head_size=local.get("d", 1), value_size=local.get("v", local.get("d", 1)),
            causal=operator.causal, last=s.cp > 1 and s.execution.kernels == "eager", flash=s.flash, generation=GENERATIONS.get(s.execution.attention, 0), dropout=s.execution.dropout > 0,
        )  # fmt: skip

    def scores_elements(self, op: int) -> int:
        """Elements of the local score matrix of an attention operator."""
        shape = self.attention_shape(op)
        return shape.batch * shape.heads * shape.query_length * shape.key_length

    def _attention(self, op: int, flops: int, moved: float, dtype: str, *, backward: bool) -> Kernel:
        s, parts = self.setting, self.letter_parts(op)
        division = s.cp * (s.tp if parts else 1)
        local_bytes = moved / division
        if not s.flash:
            # Scores written, read by the softmax, probabilities written and read again; twice that backwards.
            passes = 4 if s.execution.dropout == 0 else 6
            item = ITEM_BYTES[s.tensor_dtype]
            local_bytes += self.scores_elements(op) * item * passes * (2 if backward else 1)
        return Kernel(
            kind=OpKind.ATTENTION, dtype=dtype, flops=flops // division, bytes_moved=round(local_bytes),
            attention=self.attention_shape(op), backward=backward,
        )  # fmt: skip

    def _quantise(self, kernel: Kernel, spec: KernelSpec) -> Kernel:
        """The casts that a quantised product needs: both operands forward, the output's gradient backward."""
        assert kernel.product is not None
        b, m, n, k = kernel.product
        if not kernel.backward:
            elements = b * (m * k + n * k)
        elif spec.gradient_of == "weight":
            elements = 0  # both operands were quantised before
        else:
            elements = b * m * k  # the output's gradient, contracted over n
        width = ITEM_BYTES[self.setting.tensor_dtype] + QUANTISED_COPIES * QUANTISED_BYTES[kernel.dtype]
        return Kernel(
            kind=OpKind.ELEMENTWISE, dtype=SHORT_DTYPE[self.setting.tensor_dtype], flops=0,
            bytes_moved=round(elements * width), backward=kernel.backward, count=1 if elements else 0,
        )  # fmt: skip


def inner_collectives(local: LocalBlock, op: int) -> list[Collective]:
    """Collectives inside an operator: cross-entropy over logits sharded by class reduces the rows' maxima, then
    their sums together with the targets' logits."""
    operator, sharding = local.index.block.operators[op], local.plan.shardings[op]
    if operator.kind is not OpKind.CROSS_ENTROPY or sharding is None or not operator.inputs:
        return []
    spec = local.index.specs[operator.inputs[0]]
    if sharding.inputs[0] != f"S{len(spec.shape) - 1}":
        return []
    rows = TensorSpec(shape=spec.shape[:-1], dtype=spec.dtype)
    size = local.spec_bytes(rows, "R")
    return [
        Collective(op=CollectiveOp.ALL_REDUCE, axes=("tp",), size_bytes=parts * size, label="tp")
        for parts in (1, 2)
    ]
