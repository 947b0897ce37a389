"""Makes the block of one link: its values named, its calls as operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autoparallel.costmodel.graph import ITEM_BYTES, ONCE, ModuleCall, Operator, Saved, Size, TensorSpec
from autoparallel.planner.capture import kernels
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.costs import Costs
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.links import Link
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.nodes import (
    Frame,
    Meta,
    SavedStorage,
    is_held,
    role,
    tensor,
    tensor_inputs,
    tensor_outputs,
)
from autoparallel.planner.capture.whole import is_causal


class BlockMaker:
    """Names the values of one link, and makes operators of its calls. `inputs` are the tensors that it reads."""

    def __init__(
        self, link: Link, calls: Sequence[fx.Node], inputs: Sequence[fx.Node], fit: Fit, names: ParameterNames
    ) -> None:
        self.link, self.calls, self._fit, self._parameters = link, tuple(calls), fit, names
        self._names: dict[fx.Node, str] = {}
        self._storages: dict[int, str] = {}
        self._constants: list[fx.Node] = []
        for position, node in enumerate(inputs):
            self._name(node, f"input:{position}")
        self._call_names = dict(zip(calls, _numbered(calls), strict=True))

    def operators(self) -> tuple[Operator, ...]:
        """The block's operators, in order."""
        result = []
        for call in self.calls:
            self._name_outputs(call)
            result.append(self._operator(call, self._call_names[call]))
        return tuple(result)

    def name_all(self) -> None:
        """Name the tensors of all calls at once."""
        for call in self.calls:
            self._name_outputs(call)

    def _name_outputs(self, call: fx.Node) -> None:
        name = self._call_names[call]
        for position, node in enumerate(tensor_outputs(call)):
            self._name(node, f"{name}.{position}" if position else name)

    def _name(self, node: fx.Node, name: str) -> None:
        self._names[node] = name
        self._storages.setdefault(tensor(node).storage, name)

    def knows(self, node: fx.Node) -> bool:
        """Whether the block has a name for a tensor: it reads, holds or makes it."""
        return node in self._names or is_held(node)

    def value_name(self, node: fx.Node, caller: str = "") -> str:
        """The block's name of a tensor; that of a tied parameter is the one of the module that calls."""
        if node in self._names:
            return self._names[node]
        kind, name = role(node), node.meta["name"]
        if kind == "constant":
            if node not in self._constants:
                self._constants.append(node)
            return f"buffer:constant_{self._constants.index(node)}"
        if kind == "param":
            name = self._parameters.near(name, caller, self.link.path)
        return f"{kind}:{name.removeprefix(f'{self.link.path}.' if self.link.repeated else '')}"

    def place(self, path: str) -> str:
        """The path of a module in the block."""
        return path.removeprefix(self.link.path).removeprefix(".") if self.link.repeated else path

    def spec(self, node: fx.Node) -> TensorSpec:
        """Shape and dtype of a tensor, as functions of the micro-batch."""
        return self._fit.spec([tensor(same) for same in twins(node)])

    def buffers(self) -> tuple[tuple[str, TensorSpec], ...]:
        """Buffers and constants that the block reads."""
        found: dict[str, TensorSpec] = {}
        for call in self.calls:
            for node in tensor_inputs(call):
                name = self.value_name(node)
                if name.startswith("buffer:"):
                    found[name.removeprefix("buffer:")] = self.spec(node)
        return tuple(found.items())

    def module_calls(self, frames: Sequence[Frame]) -> tuple[ModuleCall, ...]:
        """The calls of modules that lie in the link, with the block's names of what crosses their boundaries."""
        return tuple(
            ModuleCall(
                module=frame.path.removeprefix(self.link.path).removeprefix("."),
                inputs=tuple((n, self.value_name(v)) for n, v in frame.inputs or () if self.knows(v)),
                outputs=tuple(self.value_name(v) for v in frame.outputs if self.knows(v)),
            )
            for frame in frames
        )

    def _operator(self, call: fx.Node, name: str) -> Operator:
        costs: Costs = call.meta["costs"]
        path, torch_name = call.meta["frame"].path, call.meta["torch_name"]
        return Operator(
            name=name,
            target=f"aten.{torch_name.strip('_')}",
            kind=costs.kind,
            module=self.place(path),
            inputs=tuple(self.value_name(node, path) for node in tensor_inputs(call)),
            outputs=tuple(map(self.spec, tensor_outputs(call))),
            forward=costs.forward,
            backward=costs.backward,
            saved=self._saved(call),
            shardings=call.meta["shardings"],
            labels=costs.labels,
            sizes=costs.sizes,
            causal=is_causal(torch_name, call.args, call.kwargs),
        )

    # -- saved activations -------------------------------------------------------------------------------------

    def _saved(self, call: fx.Node) -> tuple[Saved, ...]:
        result = []
        if "leaf" in call.meta:
            size = self._fit.size([same.meta["leaf"].saved_bytes for same in twins(call)])
            result.append(Saved(value="", spec=TensorSpec(shape=(size,), dtype="uint8")))
        for keeper, position, of_rounds in call.meta["keeps"]:
            # The same storage with another batch stands at the same position among what the same call keeps.
            rows = [same.meta["saved"][position] for same in twins(keeper)]
            value = self._storages.get(rows[0].storage, "")
            spec = self._storage_spec(rows, value)
            result.append(Saved(value=value, spec=spec))
            if (rounds := self._fit.rounds(twins(of_rounds))) != ONCE:
                others = rounds + Size(-1)
                result.append(Saved(value="", spec=replace(spec, shape=(others, *spec.shape))))
        return tuple(result)

    def _storage_spec(self, rows: Sequence[SavedStorage], name: str) -> TensorSpec:
        """The spec of the named tensor where it fills the storage, else of what was saved, else one dim."""
        node = next((node for node, known in self._names.items() if known == name), None)
        candidates = [[row.meta for row in rows]]
        if node is not None:
            candidates.insert(0, [tensor(same) for same in twins(node)])
        for metas in candidates:
            if all(_fills(m, row.storage_bytes) for m, row in zip(metas, rows, strict=True)):
                return self._fit.spec(metas)
        item = ITEM_BYTES.get(rows[0].meta.dtype, 1)
        size: Size = self._fit.size([row.storage_bytes // item for row in rows])
        return TensorSpec(shape=(size,), dtype=rows[0].meta.dtype)


def _numbered(calls: Sequence[fx.Node]) -> list[str]:
    """Each call's name: torch's, numbered where it stands in the link several times."""
    taken: dict[str, int] = {}
    names = []
    for call in calls:
        base = call.meta["torch_name"].strip("_") or "call"
        taken[base] = taken.get(base, -1) + 1
        names.append(f"{base}_{taken[base]}" if taken[base] else base)
    return names


def _fills(meta: Meta, storage_bytes: int) -> bool:
    count = 1
    for size in meta.shape:
        count *= size
    return count == meta.distinct and kernels.tensor_bytes(meta) == storage_bytes
