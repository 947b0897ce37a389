"""Makes the operators of one block from the calls of one link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoparallel.costmodel.graph import ITEM_BYTES, KernelSpec, Operator, OpKind, Saved, Size, TensorSpec
from autoparallel.planner.capture import kernels
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.gradients import gradient_of
from autoparallel.planner.capture.labels import Labels, attention_labels, product_labels
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.records import Call, Launch, Meta, SavedStorage, Trace
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.shardings import legal_shardings
from autoparallel.planner.capture.split import Link
from autoparallel.planner.capture.strided import with_strided_shardings
from autoparallel.planner.capture.whole import GROUPED_PRODUCTS

_ATTENTION = "scaled_dot_product_attention"
_PRODUCTS = {OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONV}

# An operator that launches several kernels is of the first of these kinds that occurs among them.
_PRIORITY = (
    OpKind.GROUPED_GEMM, OpKind.CONV, OpKind.GEMM, OpKind.EMBEDDING, OpKind.NORM, OpKind.BATCH_NORM, OpKind.POOL,
    OpKind.SOFTMAX, OpKind.DROPOUT,
    OpKind.REDUCTION, OpKind.ELEMENTWISE, OpKind.COPY,
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class OperatorMaker:
    """Names values and makes operators for one link, from its traces at several micro-batches."""

    traces: Sequence[Trace]
    fit: Fit
    link: Link
    saved: dict[int, list[SavedStorage]]
    weight_only: frozenset[int]
    rules: Rules
    names: ParameterNames
    _names: dict[int, str] = field(default_factory=dict)
    _storages: dict[int, str] = field(default_factory=dict)
    _constants: list[int] = field(default_factory=list)

    def operators(self, inputs: Sequence[int]) -> tuple[Operator, ...]:
        """The block's operators; `inputs` are the values it reads, in order."""
        trace = self.traces[0]
        for position, value in enumerate(inputs):
            self._name(value, f"input:{position}")
        taken: dict[str, int] = {}
        result = []
        for index in self.link.calls:
            base = trace.calls[index].name.strip("_") or "call"
            taken[base] = taken.get(base, -1) + 1
            name = f"{base}_{taken[base]}" if taken[base] else base
            for position, value in enumerate(trace.calls[index].outputs):
                self._name(value, f"{name}.{position}" if position else name)
            result.append(self._operator(index, name))
        return with_strided_shardings(result, self.link.calls, self.traces, self.fit, self.rules)

    def _name(self, value: int, name: str) -> None:
        self._names[value] = name
        self._storages.setdefault(self.traces[0].values[value].meta.storage, name)

    def knows(self, value: int) -> bool:
        """Whether the block has a name for a value: it reads, holds or makes it."""
        return value in self._names or self.traces[0].values[value].origin in {"param", "buffer", "constant"}

    def value_name(self, value: int, caller: str = "") -> str:
        """The block's name of a value; that of a tied parameter is the one of the module that calls."""
        if value in self._names:
            return self._names[value]
        known = self.traces[0].values[value]
        if known.origin == "constant" and value not in self._constants:
            self._constants.append(value)
        if known.origin == "constant":
            return f"buffer:constant_{self._constants.index(value)}"
        prefix = f"{self.link.path}." if self.link.repeated else ""
        name = known.name
        if known.origin == "param":
            name = self.names.near(name, caller, self.link.path)
        return f"{known.origin}:{name.removeprefix(prefix)}"

    def buffers(self) -> tuple[tuple[str, TensorSpec], ...]:
        """Buffers and constants that the block reads."""
        found: dict[str, TensorSpec] = {}
        for index in self.link.calls:
            for value in self.traces[0].calls[index].inputs:
                name = self.value_name(value)
                if name.startswith("buffer:"):
                    found[name.removeprefix("buffer:")] = self.fit.spec(
                        [t.values[value].meta for t in self.traces]
                    )
        return tuple(found.items())

    def _operator(self, index: int, name: str) -> Operator:
        calls = [t.calls[index] for t in self.traces]
        call, trace = calls[0], self.traces[0]
        kind = _kind(call)
        labels = [self._labels(t, c, kind) for t, c in zip(self.traces, calls, strict=True)]
        forward, backward = self._kernels(calls, kind, labels)
        path = trace.frames[call.frame].path
        root = self.link.path
        return Operator(
            name=name,
            target=f"aten.{call.name.strip('_')}",
            kind=kind,
            module=path.removeprefix(root).removeprefix(".") if self.link.repeated else path,
            inputs=tuple(self.value_name(v, path) for v in call.inputs),
            outputs=tuple(self._spec(position, index) for position in range(len(call.outputs))),
            forward=forward,
            backward=backward,
            saved=self._saved(index),
            shardings=legal_shardings(self.rules, self.traces, calls, self.fit),
            labels=labels[0].names if labels[0] else (),
            sizes=self._sizes(labels),
            causal=call.causal,
        )

    def _spec(self, position: int, index: int) -> TensorSpec:
        return self.fit.spec([t.values[t.calls[index].outputs[position]].meta for t in self.traces])

    def _labels(self, trace: Trace, call: Call, kind: OpKind) -> Labels | None:
        inputs = [trace.values[v].meta for v in call.inputs]
        outputs = [trace.values[v].meta for v in call.outputs]
        if kind is OpKind.ATTENTION:
            return attention_labels(inputs)
        if kind in _PRODUCTS and len(inputs) >= 2:
            return product_labels(call.name, inputs, outputs, call.constants)
        return None

    def _sizes(self, labels: Sequence[Labels | None]) -> tuple[tuple[str, Size], ...]:
        known = [label for label in labels if label is not None]
        if len(known) < len(labels):
            return ()
        return tuple((letter, self.fit.size([k.sizes[letter] for k in known])) for letter in known[0].sizes)

    # -- kernels -----------------------------------------------------------------------------------------------

    def _kernels(
        self, calls: Sequence[Call], kind: OpKind, labels: Sequence[Labels | None]
    ) -> tuple[tuple[KernelSpec, ...], tuple[KernelSpec, ...]]:
        if kind is OpKind.ATTENTION:
            return self._attention(calls, labels)
        if kind is OpKind.LEAF:
            return self._leaf(calls)
        if call_is_grouped(calls[0]):
            return self._grouped(calls, labels)
        forward = _zip_launches([c.forward for c in calls])
        backward = _zip_launches([c.backward for c in calls])
        sizes = labels[0].sizes if labels[0] else {}
        return (
            tuple(k for row in forward for k in self._launched(row, kind, sizes, is_backward=False)),
            tuple(k for row in backward for k in self._launched(row, kind, sizes, is_backward=True)),
        )

    def _launched(
        self, row: Sequence[Launch], owner: OpKind, sizes: dict[str, int], *, is_backward: bool
    ) -> tuple[KernelSpec, ...]:
        """The kernels of one launch, seen at each micro-batch: one, or two for a convolution's backward."""
        if not kernels.runs_kernel(row[0]):
            return ()
        if kernels.short_name(row[0].target) == "convolution_backward":
            return self._convolution_backward(row)
        kind = OpKind.CROSS_ENTROPY if owner is OpKind.CROSS_ENTROPY else kernels.kind_of(row[0])
        of = gradient_of(row[0], self.weight_only) if is_backward else ""
        product = ""
        if kind in _PRODUCTS and sizes:
            product = "bmnk" if not is_backward else backward_product(row[0], sizes, of)
            product = product.replace("b", "e") if kind is OpKind.GROUPED_GEMM else product
        return (
            KernelSpec(
                kind=kind,
                dtype=row[0].outputs[0].dtype if row[0].outputs else row[0].inputs[0].dtype,
                flops=self.fit.size([kernels.launch_flops(x) for x in row]),
                bytes_moved=self.fit.size([kernels.launch_bytes(x) for x in row]),
                product=product,
                gradient_of=of,
            ),
        )

    def _convolution_backward(self, row: Sequence[Launch]) -> tuple[KernelSpec, ...]:
        result = []
        for of, position, product in (("input", 0, "bmkn"), ("weight", 1, "bnkm")):
            parts = [kernels.convolution_gradient(launch, position) for launch in row]
            if parts[0] is not None:
                result.append(
                    KernelSpec(
                        kind=OpKind.CONV,
                        dtype=row[0].inputs[0].dtype,
                        flops=self.fit.size([p[0] for p in parts if p]),
                        bytes_moved=self.fit.size([p[1] for p in parts if p]),
                        product=product,
                        gradient_of=of,
                    )
                )
        return tuple(result)

    def _attention(
        self, calls: Sequence[Call], labels: Sequence[Labels | None]
    ) -> tuple[tuple[KernelSpec, ...], tuple[KernelSpec, ...]]:
        """One kernel forward and one backward: the tensors once each, and the statistics."""
        first = self.traces[0]
        needs = tuple(first.values[i].requires_grad for i in calls[0].inputs[:3])
        flops, gradient_flops, moved = [], [], []
        for trace, call, label in zip(self.traces, calls, labels, strict=True):
            assert label is not None
            flops.append(kernels.attention_flops(label.sizes))
            gradient_flops.append(kernels.attention_flops(label.sizes, (needs[0], needs[1], needs[2])))
            tensors = [trace.values[i].meta for i in (*call.inputs, *call.outputs)]
            statistics = label.sizes["b"] * label.sizes["h"] * label.sizes["s"]
            moved.append(sum(map(kernels.tensor_bytes, tensors)) + statistics * ITEM_BYTES["float32"])
        made = first.values[calls[0].outputs[0]]
        kernel = KernelSpec(
            kind=OpKind.ATTENTION,
            dtype=made.meta.dtype,
            flops=self.fit.size(flops),
            bytes_moved=self.fit.size(moved),
        )
        if not made.requires_grad:
            return (kernel,), ()
        # Backward reads what forward moved and the output's gradient, and writes the inputs' gradients.
        back = replace(
            kernel,
            flops=self.fit.size(gradient_flops),
            bytes_moved=kernel.bytes_moved * 2,
            gradient_of="input",
        )
        return (kernel,), (back,)

    def _leaf(self, calls: Sequence[Call]) -> tuple[tuple[KernelSpec, ...], tuple[KernelSpec, ...]]:
        """One kernel each way, as measured; the backward pass moves what the forward moved twice."""
        costs = [call.leaf for call in calls if call.leaf is not None]
        forward = KernelSpec(
            kind=OpKind.LEAF,
            dtype=self._dtype(calls[0]),
            flops=self.fit.size([c.forward_flops for c in costs]),
            bytes_moved=self.fit.size([c.moved_bytes for c in costs]),
        )
        if not any(self.traces[0].values[i].requires_grad for i in calls[0].outputs):
            return (forward,), ()
        backward = replace(
            forward,
            flops=self.fit.size([c.backward_flops for c in costs]),
            bytes_moved=forward.bytes_moved * 2,
            gradient_of="input",
        )
        return (forward,), (backward,)

    def _dtype(self, call: Call) -> str:
        made = [self.traces[0].values[i].meta.dtype for i in call.outputs]
        return made[0] if made else "float32"

    def _grouped(
        self, calls: Sequence[Call], labels: Sequence[Labels | None]
    ) -> tuple[tuple[KernelSpec, ...], tuple[KernelSpec, ...]]:
        """A product of experts: 2 · rows · n · k forward and for each gradient, however the rows are routed."""
        flops, moved = [], []
        for trace, call, label in zip(self.traces, calls, labels, strict=True):
            assert label is not None
            flops.append(2 * label.sizes["m"] * label.sizes["n"] * label.sizes["k"])
            tensors = [trace.values[i].meta for i in (*call.inputs[:2], *call.outputs)]
            moved.append(sum(map(kernels.tensor_bytes, tensors)))
        made = self.traces[0].values[calls[0].outputs[0]]
        kernel = KernelSpec(
            kind=OpKind.GROUPED_GEMM,
            dtype=made.meta.dtype,
            flops=self.fit.size(flops),
            bytes_moved=self.fit.size(moved),
            product="emnk",
        )
        wanted = [self.traces[0].values[i].requires_grad for i in calls[0].inputs[:2]]
        halves = (("input", "emkn"), ("weight", "enkm"))
        backward = [
            replace(kernel, gradient_of=of, product=product)
            for (of, product), want in zip(halves, wanted, strict=True)
            if want and made.requires_grad
        ]
        return (kernel,), tuple(backward)

    # -- saved activations -------------------------------------------------------------------------------------

    def _saved(self, index: int) -> tuple[Saved, ...]:
        result = []
        leaves = [call.leaf for call in (t.calls[index] for t in self.traces) if call.leaf is not None]
        if leaves:
            size = self.fit.size([leaf.saved_bytes for leaf in leaves])
            result.append(Saved(value="", spec=TensorSpec(shape=(size,), dtype="uint8")))
        for entry in self.saved.get(index, ()):
            rows = [self._same_saved(t, entry) for t in self.traces]
            value = self._storages.get(entry.storage, "")
            result.append(Saved(value=value, spec=self._storage_spec(rows, value)))
        return tuple(result)

    def _same_saved(self, trace: Trace, entry: SavedStorage) -> SavedStorage:
        """The same storage in another trace: at the same position among what the same call keeps."""
        call = trace.calls[entry.call]
        return call.saved[entry.position]

    def _storage_spec(self, rows: Sequence[SavedStorage], name: str) -> TensorSpec:
        """The spec of the named value where it fills the storage, else of what was saved, else one dim."""
        value = next((v for v, known in self._names.items() if known == name), None)
        candidates = [[row.meta for row in rows]]
        if value is not None:
            candidates.insert(0, [t.values[value].meta for t in self.traces])
        for metas in candidates:
            if all(_fills(m, row.storage_bytes) for m, row in zip(metas, rows, strict=True)):
                return self.fit.spec(metas)
        item = ITEM_BYTES.get(rows[0].meta.dtype, 1)
        return TensorSpec(
            shape=(self.fit.size([row.storage_bytes // item for row in rows]),), dtype=rows[0].meta.dtype
        )


def _fills(meta: Meta, storage_bytes: int) -> bool:
    return _count(meta.shape) == meta.distinct and kernels.tensor_bytes(meta) == storage_bytes


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _zip_launches(rows: Sequence[Sequence[Launch]]) -> list[tuple[Launch, ...]]:
    return list(zip(*rows, strict=True))


def call_is_grouped(call: Call) -> bool:
    """Whether a call is a product of experts that the tracer kept whole."""
    return call.name in GROUPED_PRODUCTS and all(not kernels.runs_kernel(x) for x in call.forward)


def _kind(call: Call) -> OpKind:
    if call.leaf is not None:
        return OpKind.LEAF
    if call_is_grouped(call):
        return OpKind.GROUPED_GEMM
    if call.name == _ATTENTION:
        return OpKind.ATTENTION
    if call.name in {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}:
        return OpKind.CROSS_ENTROPY
    found = {kernels.kind_of(x) for x in call.forward if kernels.runs_kernel(x)}
    return next((kind for kind in _PRIORITY if kind in found), OpKind.VIEW)


def backward_product(launch: Launch, sizes: dict[str, int], of: str) -> str:
    """Letters (batch, rows, columns, contracted) of a gradient product, found by its sizes.

    The gradient of the first operand contracts n, that of the second contracts m; either may be computed
    transposed.
    """
    first, second = launch.inputs[-2].shape, launch.inputs[-1].shape
    if len(first) < 2 or len(second) < 2:
        return "bmkn"
    measured = (first[-2], second[-1], first[-1])
    order = ("bnkm", "bknm", "bmkn", "bkmn") if of == "weight" else ("bmkn", "bkmn", "bnkm", "bknm")
    for letters in order:
        if tuple(sizes[x] for x in letters[1:]) == measured:
            return letters
    return order[0]
