"""Reads device and cluster files. Every mistake in one is a `UserError` that names file, key and remedy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from autoparallel.errors import UserError
from autoparallel.profiles.build import build_cluster, build_device, cluster_of, constant_keys
from autoparallel.profiles.hardware import Cluster, Device
from autoparallel.profiles.schema import SCHEMA, ArchitectureFile, ClusterFile, DeviceFile, nearest

SHIPPED = Path(__file__).parent
_SPEC = re.compile(r"(?P<device>.+):(?P<nodes>\d+)x(?P<per_node>\d+)")
_Table = TypeVar("_Table", bound=BaseModel)


def device_names(dirs: Sequence[Path] = ()) -> tuple[str, ...]:
    """Names of the device profiles that ship, and of those in `dirs`."""
    return tuple(sorted(_files("devices", dirs, "memory")))


def cluster_names(dirs: Sequence[Path] = ()) -> tuple[str, ...]:
    """Names of the cluster files that ship, and of those in `dirs`."""
    return tuple(sorted(_files("clusters", dirs, "group")))


def load_device(name_or_path: str, *, dirs: Sequence[Path] = ()) -> Device:
    """A device by the name of its profile, or from a file. Profiles in `dirs` go before those that ship."""
    path = _resolve(name_or_path, _files("devices", dirs, "memory"), "device")
    if not dirs and path.parent == SHIPPED / "devices":
        return _shipped_device(path)
    return parse_device(read_toml(path), str(path), dirs=dirs)


@cache
def _shipped_device(path: Path) -> Device:
    """What ships stays as it is while a process lasts, which asks for the same few devices again and again."""
    return parse_device(read_toml(path), str(path))


def own_constants(name_or_path: str, *, dirs: Sequence[Path] = ()) -> tuple[str, tuple[str, ...]]:
    """The architecture that a device file names, and the constants that it sets itself, by dotted key."""
    path = _resolve(name_or_path, _files("devices", dirs, "memory"), "device")
    table = check(DeviceFile, read_toml(path), str(path))
    return table.architecture, constant_keys(table.constants, str(path))


def stated_constants(
    name_or_path: str, *, dirs: Sequence[Path] = ()
) -> tuple[tuple[Path, tuple[str, ...]], ...]:
    """The files that a device has its constants from, each with those that it states: the device's own first, then its
    architecture's and those that this one is like. A file's go before those of the files after it."""
    path = _resolve(name_or_path, _files("devices", dirs, "memory"), "device")
    table = check(DeviceFile, read_toml(path), str(path))
    trees = [(path, table.constants)]
    for above, architecture in _lineage(table.architecture, dirs) if table.architecture else ():
        trees.append((above, architecture.constants))
    return tuple((file.resolve(), constant_keys(tree, str(file))) for file, tree in trees)


def load_cluster(spec: str, *, dirs: Sequence[Path] = ()) -> Cluster:
    """A cluster from a file, from a shipped file's name, or from `DEVICE:NODESxPER_NODE`.

    A device's own file stands for one box of it.
    """
    match = _SPEC.fullmatch(spec)
    if match and not Path(spec).exists():
        device = load_device(match["device"], dirs=dirs)
        return cluster_of(device, int(match["nodes"]), int(match["per_node"]), spec)
    files = _files("clusters", dirs, "group")
    if spec not in files and not is_path(spec):
        _no_such_cluster(spec, tuple(files), device_names(dirs))
    path = _resolve(spec, files, "cluster")
    table = read_toml(path)
    if "mesh" in table or "problem" in table:
        raise UserError(
            f"{path}: is a strategy file; --cluster takes a cluster or device file, a shipped cluster's name, or "
            "DEVICE:NODESxPER_NODE"
        )
    if "memory" in table and "group" not in table:
        device = parse_device(table, str(path), dirs=dirs)
        return cluster_of(device, 1, device.cores or device.devices_per_node, spec)
    return parse_cluster(table, str(path), dirs=dirs)


def parse_device(data: object, where: str, *, dirs: Sequence[Path] = ()) -> Device:
    """A device from a file's table; `where` is what error messages call it."""
    table = check(DeviceFile, data, where)
    above = _lineage(table.architecture, dirs) if table.architecture else []
    publishers = above[0][1].publishers if above else 0
    return build_device(table, [one.constants for _, one in above], where, publishers=publishers)


def _lineage(name: str, dirs: Sequence[Path]) -> list[tuple[Path, ArchitectureFile]]:
    """An architecture's file and those whose constants it takes where it states none, nearest first."""
    files, found, seen = _files("architectures", dirs, "constants"), [], [name]
    while name:
        path = _resolve(name, files, "architecture")
        found.append((path, check(ArchitectureFile, read_toml(path), str(path))))
        name = found[-1][1].like
        if name in seen:
            raise UserError(
                f"{path}: `like`: {' -> '.join([*seen, name])} comes back to itself; leave one out"
            )
        seen.append(name)
    return found


def parse_cluster(data: object, where: str, *, dirs: Sequence[Path] = ()) -> Cluster:
    """A cluster from a file's table; its devices are names, paths or whole tables."""
    table = check(ClusterFile, data, where)
    devices = []
    for index, group in enumerate(table.group):
        if isinstance(group.device, str):
            beside = Path(where).parent / group.device
            name = str(beside) if is_path(group.device) and beside.exists() else group.device
            devices.append(load_device(name, dirs=dirs))
        else:
            devices.append(parse_device(group.device, f"{where}: group.{index}.device", dirs=dirs))
    return build_cluster(table, devices, where)


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def check(model: type[_Table], data: object, where: str) -> _Table:
    """`data` as `model`, or a `UserError` with every mistake, one a line."""
    schema = data.get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(
            f"{where}: schema = {schema} is newer than this version reads ({SCHEMA}); "
            "upgrade autoparallel, or write the file in the older schema"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_message(detail["loc"], _in_words(detail), where) for detail in error.errors()]
        raise UserError("\n".join(lines)) from None


def _in_words(detail: Mapping[str, Any]) -> str:
    """What pydantic says, in the words of a TOML file."""
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "list_type" and isinstance(detail["input"], dict):
        return f"must be a list of tables: write [[{detail['loc'][-1]}]]"
    if detail["type"] == "finite_number":
        return f"= {detail['input']} must be a finite number"
    return str(detail["msg"])


def _message(loc: tuple[int | str, ...], message: str, where: str) -> str:
    key = ".".join(str(part) for part in loc)
    return f"{where}: {f'`{key}`: ' if key else ''}{message}"


def is_path(text: str) -> bool:
    """Whether a word names a file rather than something that ships."""
    return text.endswith(".toml") or "/" in text


def _files(folder: str, dirs: Sequence[Path], marker: str) -> dict[str, Path]:
    """Profiles by name; a user's folder may hold devices and clusters side by side, told apart by a key."""
    found = {path.stem: path for path in sorted((SHIPPED / folder).glob("*.toml"))}
    for directory in dirs:
        if not directory.is_dir():
            raise UserError(f"{directory}: no such folder of device and cluster files")
        for path in sorted([*directory.glob("*.toml"), *(directory / folder).glob("*.toml")]):
            if path.parent.name == folder or marker in read_toml(path):
                found[path.stem] = path
    return found


def _resolve(name: str, files: Mapping[str, Path], what: str) -> Path:
    if name in files:
        return files[name]
    if is_path(name):
        if Path(name).is_dir():
            raise UserError(_is_folder(name, what))
        if not Path(name).is_file():
            raise UserError(f"{name}: no such {what} file")
        return Path(name)
    raise UserError(f"unknown {what} `{name}`{nearest(name, files)}; known: {', '.join(sorted(files))}")


def _is_folder(name: str, what: str) -> str:
    inside = sorted(path.name for path in Path(name).glob("*.toml"))
    return f"{name}: is a folder; give the {what} file itself" + (
        f", such as {Path(name) / inside[0]}" if inside else ""
    )


def _no_such_cluster(spec: str, clusters: Sequence[str], devices: Sequence[str]) -> None:
    name, colon, shape = spec.partition(":")
    if colon:
        raise UserError(
            f"cluster `{spec}`: `{shape}` is not NODESxPER_NODE; write for instance `{name}:2x8` "
            "for two nodes of eight devices"
        )
    if name in devices:
        raise UserError(f"cluster `{spec}` is a device; say how many: `{spec}:1x1`, or NODESxPER_NODE")
    if Path(spec).is_dir():
        raise UserError(_is_folder(spec, "cluster"))
    hint = nearest(spec, clusters)
    raise UserError(
        f"unknown cluster `{spec}`{hint}; give a cluster file, DEVICE:NODESxPER_NODE, "
        f"or one of {', '.join(sorted(clusters))}"
    )
