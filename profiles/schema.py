"""What device, architecture and cluster files may hold: strict pydantic models, the only ones in this package.

Every number is bare or a table `{ value, kind, source }`. An unknown key is an error that names the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from autoparallel.errors import UserError
from autoparallel.profiles.hardware import ValueKind

SCHEMA = 1


def nearest(word: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)" for the known word most like `word`, or ""."""
    candidates = list(known)
    begins = [one for one in candidates if word and one.startswith(f"{word}-")]  # "h100" means a kind of H100
    match = begins or difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f" (did you mean `{match[0]}`?)" if match else ""


class Strict(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise PydanticCustomError("table", "must be a table")
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data:
            if key not in known:
                text = f"unknown key `{key}`{nearest(str(key), known)}; known keys: {', '.join(known)}"
                raise PydanticCustomError("unknown_key", "{text}", {"text": text})
        return data


def _number(raw: Any) -> Any:
    """A bare number is the user's own figure."""
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return {"value": float(raw), "kind": ValueKind.USER, "source": ""}
    if not isinstance(raw, dict):
        raise PydanticCustomError("number", "must be a number, or a table with value, kind and source")
    return raw


def _kind(raw: Any) -> Any:
    kinds = [str(kind) for kind in ValueKind]
    if raw not in kinds:
        text = f"kind `{raw}` is not one of {', '.join(kinds)}{nearest(str(raw), kinds)}"
        raise PydanticCustomError("kind", "{text}", {"text": text})
    return ValueKind(raw)


class FigureTable(Strict):
    """A number, and how it is known."""

    value: float = Field(allow_inf_nan=False)
    kind: Annotated[ValueKind, BeforeValidator(_kind)] = ValueKind.USER
    source: str = ""


Figure = Annotated[FigureTable, BeforeValidator(_number)]


class MemoryTable(Strict):
    """Bytes that an allocation may use, and how much of them is not the program's."""

    bytes: Figure
    reserve_bytes: Figure


class LevelTable(Strict):
    """A network level; `size` may be missing on the outermost, which then takes the whole cluster."""

    name: str
    size: Figure | None = None
    bytes_per_s: Figure
    latency_s: Figure
    oversubscription: Figure | None = None
    in_network_reduction: bool = False
    nics: Figure | None = None


class BoxTable(Strict):
    """The usual node and network of a device. `cores`: devices beyond that many share the node's compute."""

    devices_per_node: Figure
    cores: Figure | None = None
    levels: list[LevelTable] = Field(min_length=1)


class ProvenanceTable(Strict):
    """Kind and source of figures that are written bare beside it."""

    kind: Annotated[ValueKind, BeforeValidator(_kind)]
    source: str
    keys: list[str]


class ResidualTable(Strict):
    """What a fit left unexplained of one family of measurements: relative errors."""

    samples: int
    mean_absolute_error: float
    p90_absolute_error: float
    bias: float


class PosteriorTable(Strict):
    """What measured steps left unknown of a device's parts."""

    parts: list[str]
    covariance: list[list[float]]
    rows: int
    noise: float

    @model_validator(mode="after")
    def _square(self) -> PosteriorTable:
        count = len(self.parts)
        if len(self.covariance) != count or any(len(row) != count for row in self.covariance):
            raise PydanticCustomError("square", "covariance must have a row and a column for each of parts")
        return self


class DeviceFile(Strict):
    """A device file; constants that it lacks come from its architecture's file."""

    schema_: int = Field(alias="schema", default=SCHEMA)
    name: str
    architecture: str = "generic"
    memory: MemoryTable
    peak_flops: dict[str, Figure] = Field(min_length=1)
    hbm_bytes_per_s: Figure
    box: BoxTable
    constants: dict[str, Any] = Field(default_factory=dict)
    provenance: list[ProvenanceTable] = Field(default_factory=list)
    residuals: dict[str, ResidualTable] = Field(default_factory=dict)
    posterior: PosteriorTable | None = None


class ArchitectureFile(Strict):
    """Constants that the devices of one generation share; those it does not state are of the one that it is `like`."""

    schema_: int = Field(alias="schema", default=SCHEMA)
    name: str
    like: str = ""
    publishers: int = 0
    constants: dict[str, Any]


class GroupTable(Strict):
    """Equal nodes; `device` is a name, a path, or a device's whole table.

    `short` has the devices of nodes that lack some, by the node's number in the group; `level` the group's own
    network, which counts where the group is used alone.
    """

    device: Any
    nodes: Figure
    devices_per_node: Figure
    price_per_device_hour: Figure | None = None
    short: dict[str, Figure] = Field(default_factory=dict)
    level: list[LevelTable] = Field(default_factory=list)


class SwitchTable(Strict):
    """A switch, the nodes at its ports (numbered through the groups), and the switch above it.

    `bytes_per_s` is what one node's ports carry; the trunk `up` carries those of all its nodes, divided by
    `oversubscription`.
    """

    name: str
    nodes: list[int] = Field(default_factory=list)
    bytes_per_s: Figure | None = None
    latency_s: Figure | None = None
    up: str | None = None
    oversubscription: Figure | None = None


class LinkTable(Strict):
    """A cable between two of `node-0`, `node-1`, … and the switches."""

    between: list[str] = Field(min_length=2, max_length=2)
    bytes_per_s: Figure
    latency_s: Figure


class FailuresTable(Strict):
    """How often devices fail, and how long it takes until they are back."""

    mtbf_hours_per_device: Figure
    storage_bytes_per_s: Figure
    detect_s: Figure | None = None
    restart_s: Figure | None = None
    replace_s: Figure | None = None


class ClusterFile(Strict):
    """A cluster file; without levels it has those of its first device's box.

    With switches or links the levels end at the node, and these are what joins the nodes.
    """

    schema_: int = Field(alias="schema", default=SCHEMA)
    name: str = ""
    group: list[GroupTable] = Field(min_length=1)
    level: list[LevelTable] = Field(default_factory=list)
    switch: list[SwitchTable] = Field(default_factory=list)
    link: list[LinkTable] = Field(default_factory=list)
    nics: Figure | None = None
    failures: FailuresTable | None = None
    provenance: list[ProvenanceTable] = Field(default_factory=list)


def check_figure(raw: Any, where: str) -> FigureTable:
    """A number, bare or with kind and source; `where` starts the error message."""
    try:
        return TypeAdapter(Figure).validate_python(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {error.errors()[0]['msg']}") from None
