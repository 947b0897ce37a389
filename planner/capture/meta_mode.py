"""Runs a model on the meta device whatever device it is written for, and remembers the values of small
integer tensors, so that code that looks at position ids or an attention mask takes the path it takes in earnest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.planner.capture.choices import chosen
from autoparallel.planner.capture.errors import UntraceableError
from autoparallel.planner.capture.guards import VALUES, Unknown, that_holds
from autoparallel.planner.capture.indexing import check_mask, check_put, check_rows
from autoparallel.planner.capture.trees import leaves, mapped, tensors
from autoparallel.planner.capture.uniform import OF_ALL, compacted, distinct
from autoparallel.planner.capture.values import Values, storage_key

# Tensors of at most this many elements keep their values: position ids and padding masks of long sequences do,
# attention masks over the square of a long sequence do not (kind: chosen; it bounds the memory of a capture, and
# leaves room for a million tokens).
KNOWN_VALUES_LIMIT = 1 << 23

# The same for which token goes to which expert (`choices`), as many flags as tokens times experts times choices: a byte each,
# and by what code does with such flags alone. Kind: chosen; a quarter of a gigabyte.
_FLAGS_LIMIT = 1 << 28
_OF_FLAGS = frozenset(
    {"_to_copy", "sum", "nonzero", "gt", "ne", "eq", "permute", "transpose", "t", "select", "slice",
     "squeeze", "unsqueeze", "view", "_unsafe_view", "alias", "detach", "unbind", "index"}
)  # fmt: skip

# Factories whose contents are given by their arguments.
_FACTORIES = frozenset(
    {"arange", "zeros", "ones", "full", "scalar_tensor", "eye", "linspace", "tril_indices", "triu_indices"}
)

# Those without contents: what a model fills number by number (the shapes of its levels) starts from zeros.
_UNFILLED = frozenset({"empty", "new_empty", "empty_like"})

_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})

# Random numbers of the shape of their parameters, for which the meta device has no kernels.
_DRAWN = frozenset({"aten::_sample_dirichlet", "aten::poisson", "aten::binomial"})

_OF_NUMBERS = frozenset({"tensor", "as_tensor", "asarray"})
READERS = frozenset({"tolist", "numpy", "item", "__format__"})

_META, _CPU = torch.device("meta"), torch.device("cpu")

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class MetaMode(TorchDispatchMode):
    """Every operator runs on the meta device; `observer` is told of each, below autograd. With `shares` what is chosen by
    unknown numbers is known (`choices`): equal shares of so many samples."""

    def __init__(self, observer: Observer, shares: int | None = None) -> None:
        super().__init__()
        self.shares = shares
        self._observer = observer
        self._values = Values()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._converted: dict[int, torch.UntypedStorage] = {}
        self._results: dict[object, Any] = {}  # operator and arguments -> what its result looks like
        self._alive: list[object] = []  # storages are told apart by address: none may be freed
        self._made: set[int] = set()  # storages that operators filled
        self._guessed: set[int] = (
            set()
        )  # of flags, some of which are taken to be set: whether all are nobody knows

    def to_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor that aliases as `tensor` does, with its values remembered where they are small."""
        if tensor.device.type == "meta":
            return tensor
        key = storage_key(tensor)
        if key not in self._converted:
            size = max(tensor.untyped_storage().nbytes(), 1)
            self._converted[key] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            self._alive.append(tensor)
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        with torch.no_grad():
            meta.set_(self._converted[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() <= KNOWN_VALUES_LIMIT:
            # One on a CPU as it is: where this mode is on, what `detach` returns would be on the meta device.
            self.remember(meta, tensor if tensor.device.type == "cpu" else tensor.detach().cpu())
        return meta

    def remember(self, meta: torch.Tensor, real: torch.Tensor) -> None:
        """From now on the values of `meta` are those of `real`."""
        self._values.remember(meta, real)
        self._alive.append(meta)

    def forget(self) -> None:
        """Let go of all values, once nothing will ask for them."""
        self._values.clear()

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, where they are remembered."""
        return self._values.of(tensor)

    def numbers(self, name: str, tensor: object, *rest: Any) -> Any:
        """What torch's method `name` reads of a tensor's values at once (`tolist`, `numpy`), which no operator shows."""
        if not isinstance(tensor, torch.Tensor):
            return getattr(tensor, name)(*rest)
        value = self.known(tensor) if tensor.is_meta else tensor.detach()
        if (
            name == "__format__"
        ):  # in a name of a module, say; in what is shown of a tensor nobody looks at its values
            one = value is not None and not value.dim()
            return format(
                value.item() if one and value is not None else "tensor(...)", *(rest if one else ())
            )
        if value is None:
            return self._unknown(name, tensor)
        return getattr(value, name)(*rest)

    def _unknown(self, name: str, tensor: torch.Tensor) -> Any:
        """What stands for numbers that nobody knows: of one that is written down or computed with something that tells when it
        decides, of many that other libraries choose by zeros, as all choices are taken to be alike."""
        if name == "item" and tensor.numel() == 1:
            return Unknown() if tensor.is_floating_point() else self._item(tensor)
        if name == "numpy" and self.shares is not None and tensor.is_floating_point():
            return numpy.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        raise UntraceableError(VALUES)

    def in_sight(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, so that a tensor that is made of numbers in the code keeps them: torch would put it on
        the meta device before anybody sees it, and read numbers that stand in tensors out of sight."""
        if name not in _OF_NUMBERS:
            return args, kwargs
        if args and isinstance(args[0], list | tuple) and any(t.is_meta for t in tensors(args[0])):
            args = (mapped(lambda leaf: self._item(leaf) if _is_tensor(leaf) else leaf, args[0]), *args[1:])
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        return args, kwargs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep torch._dynamo out of our frames means importing it, for more than a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = mapped(self._argument, args), mapped(self._argument, kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(args[0])
        inputs = tensors((args, kwargs))
        real = self._run_known(func, args, kwargs, inputs)
        if real is None:
            func, args = self._as_indexing(func, args)
            args = self._where_known(func, args)
            if func is torch.ops.aten.embedding.default:
                check_rows(args[0], self.known(args[1]))
            self._forget_mutated(func, args)
            out = self._run(func, args, kwargs)
            self._share_out(func, args, kwargs, out)
        else:
            out = self._like(func, args, kwargs, real)
        self._alive.append(out)
        given = {storage_key(t) for t in inputs}
        self._made.update(key for t in tensors(out) if (key := storage_key(t)) not in given)
        self._observer(func, args, kwargs, out)
        return out

    def _share_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.shares is not None and (found := chosen(func, args, kwargs, out, self.shares)) is not None:
            self.remember(*found)
            if found[1].dtype is torch.bool and distinct(found[1]) > 1:
                self._guessed.add(storage_key(found[0]))

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.to_meta(leaf)
        if isinstance(leaf, torch.device):
            return _META
        return leaf

    def _as_indexing(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A selection by a mask whose values are known as the indexing that it is."""
        values = self.known(args[1]) if func is torch.ops.aten.masked_select.default else None
        if values is None:
            return func, args
        shape = torch.broadcast_shapes(args[0].shape, values.shape)
        places = map(self.to_meta, values.expand(shape).nonzero().unbind(1))
        return torch.ops.aten.index.Tensor, (args[0].expand(shape), list(places))

    def _where_known(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an indexing, with masks whose values are known as the places that they pick."""
        if func._schema.name not in _INDEXING:
            return args
        places: list[Any] = []
        picks = False
        for index in args[1]:
            values = self.known(index) if index is not None and index.dtype is torch.bool else None
            if values is not None:
                check_mask(values, args[0], len(places))
            picks |= values is not None
            places += [index] if values is None else map(self.to_meta, values.nonzero().unbind(1))
        if picks and len(args) > 2:
            check_put(args[0], places, args[2])
        return (args[0], places, *args[2:])

    def _item(self, tensor: torch.Tensor) -> Any:
        value = self.known(tensor)
        if value is None:
            answer = that_holds() if tensor.dtype is torch.bool else None
            if answer is None:
                raise UntraceableError(VALUES)
            return answer
        return value.item()

    def _run_known(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        """The result on real values, if all of the operator's inputs are known; else None."""
        name = func._schema.name.split("::")[-1]
        limit = KNOWN_VALUES_LIMIT if self.shares is None or name not in _OF_FLAGS else _FLAGS_LIMIT
        if name in _UNFILLED:
            return _integers_to_fill(name, args, kwargs)
        if name == "rand" and math.prod(args[0]) == 1:
            # One random number decides whether a layer is dropped: it is kept.
            return torch.full(args[0], 1.0 - torch.finfo(torch.float32).eps)
        if not inputs and name not in _FACTORIES:
            return None
        if name in OF_ALL and storage_key(inputs[0]) in self._guessed:
            return None
        if inputs and (answer := _if_finite(name, args)) is not None:
            return torch.tensor(answer).expand(inputs[0].shape)
        if name == "_is_all_true" and self.shares is not None:
            return torch.tensor(True)
        if name in {"eq", "ne"} and self._are_data(*args):
            return torch.tensor(name == "ne").expand(inputs[0].shape)
        values: dict[int, torch.Tensor] = {}
        for tensor in inputs:
            value = self.known(tensor)
            if value is None or distinct(value) > limit:
                # What a model checks of its data holds in training.
                return torch.tensor(True) if name == "_is_all_true" else None
            # Flags are kept as bytes.
            narrow = value.dtype != tensor.dtype and name not in _OF_FLAGS
            values[id(tensor)] = value.to(tensor.dtype) if narrow else value
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        compact = compacted(func, name, list(values.values()))
        if compact is not None:
            values = dict(zip(values, compact[0], strict=True))
        sees = any(r.alias_info is not None for r in func._schema.returns)  # and computes nothing
        if not sees and not _small(leaves((args, kwargs)), list(values.values()), name, limit):
            return None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return values[id(leaf)]
            return _CPU if isinstance(leaf, torch.device) else leaf

        real_kwargs = mapped(real, kwargs) | ({} if inputs else {"device": _CPU})
        if name == "_to_copy":
            real_kwargs |= _of_bytes(values[id(inputs[0])], kwargs.get("dtype"))
        try:
            result = func(*mapped(real, args), **real_kwargs)
        except RuntimeError:
            if not sees or sum(value.numel() for value in values.values()) > limit:
                return None
            values = {key: value.contiguous() for key, value in values.items()}
            result = func(*mapped(real, args), **real_kwargs)
        return result if compact is None or not compact[1] else result.expand(compact[1])

    def _are_data(self, tensor: torch.Tensor, number: object) -> bool:
        """Whether numbers that the model was given, which nobody knows, are compared with one: they are not that one."""
        is_given = tensor.is_floating_point() and storage_key(tensor) not in self._made
        return is_given and not _is_tensor(number) and self.known(tensor) is None

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result on meta tensors. Where nothing is aliased it is made again from its shapes: torch takes
        milliseconds to find those of a batch norm, and a model has many that are equal."""
        if func._schema.is_mutable or any(r.alias_info is not None for r in func._schema.returns):
            return self._run_fresh(func, args, kwargs)
        try:
            key = (func, *map(_argument_key, leaves((args, tuple(kwargs.items())))))
            if key in self._results:
                return mapped(_made_again, self._results[key])
        except TypeError:  # an argument that cannot be hashed
            return self._run_fresh(func, args, kwargs)
        out = self._run_fresh(func, args, kwargs)
        inputs = {storage_key(t) for t in tensors((args, kwargs))}
        if not any(storage_key(t) in inputs or not t.is_meta for t in tensors(out)):
            self._results[key] = mapped(_Shape.of, out)
        return out

    def _run_fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not tensors((args, kwargs)) and any(a.name == "device" for a in func._schema.arguments):
            kwargs = {**kwargs, "device": _META}
        if func._schema.name in _DRAWN:
            return torch.empty_like(args[0])
        return func(*args, **kwargs)

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], real: Any) -> Any:
        """The result on meta tensors, with `real` remembered as its values."""
        if torch.Tag.dynamic_output_shape in func.tags:
            out = mapped(lambda t: torch.empty_like(t, device="meta") if _is_tensor(t) else t, real)
        else:
            out = self._run(func, args, kwargs)
        for meta, value in zip(leaves(out), leaves(real), strict=True):
            if _is_tensor(meta):
                self.remember(meta, value)
        return out

    def _forget_mutated(self, func: Any, args: tuple[Any, ...]) -> None:
        if not func._schema.is_mutable or not args:
            return
        for leaf in tensors(args[0]):
            self._values.forget(leaf)


def _of_bytes(source: torch.Tensor, dtype: torch.dtype | None) -> dict[str, Any]:
    """The dtype in which many flags are kept that become integers."""
    are_flags = source.dtype in (torch.bool, torch.uint8) and dtype in (torch.int64, torch.int32)
    return {"dtype": torch.uint8} if are_flags and source.numel() > KNOWN_VALUES_LIMIT else {}


def _integers_to_fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Zeros in the place of a small tensor of integers without contents; None for any other."""
    size = args[0] if name == "empty" else args[1] if name == "new_empty" else args[0].shape
    like = None if name == "empty" else args[0].dtype
    dtype = kwargs.get("dtype") or like or torch.get_default_dtype()
    if dtype.is_floating_point or dtype.is_complex or math.prod(size) > KNOWN_VALUES_LIMIT:
        return None
    return torch.zeros(tuple(size), dtype=dtype)


def _if_finite(name: str, args: tuple[Any, ...]) -> bool | None:
    """What a test for infinities or NaNs says of numbers as they are in training: there are none. None: no such test."""
    if name in {"isinf", "isnan"}:
        return False
    if name in {"eq", "ne"} and len(args) == 2 and args[0].is_floating_point():
        same, infinite = args[1] is args[0], isinstance(args[1], float) and math.isinf(args[1])
        return (name == "eq") == same if same or infinite else None
    return None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a tensor that aliases nothing is made from."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        return cls(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _made_again(leaf: Any) -> Any:
    if isinstance(leaf, _Shape):
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=_META)
    return leaf


def _argument_key(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)
    return (type(leaf), leaf)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _small(arguments: list[Any], inputs: list[torch.Tensor], name: str, limit: int) -> bool:
    """Whether the result on real values is cheap enough to compute."""
    if name in {"repeat", "tril_indices", "triu_indices"} or (name in _FACTORIES and name != "arange"):
        product = 1
        for leaf in arguments:
            product *= max(abs(leaf), 1) if isinstance(leaf, int) and not isinstance(leaf, bool) else 1
        return product <= limit
    try:
        return bool(torch.broadcast_shapes(*(t.shape for t in inputs)).numel() <= limit)
    except RuntimeError:
        return True
