"""Writes a device file: the figures that are its own; the rest comes from the architecture it names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import tomli_w

from autoparallel.profiles.convert import device_to_dict
from autoparallel.profiles.hardware import Device


def device_file(device: Device, architecture: str, own: Collection[str]) -> dict[str, Any]:
    """The file's table. `own` are the provenance keys of the constants to write ("constants.gemm.units")."""
    table = device_to_dict(device)
    table["architecture"] = architecture
    kept = {key.removeprefix("constants.") for key in own if key.startswith("constants.")}
    table["constants"] = _pruned(table["constants"], kept)
    listed = []
    for entry in table["provenance"]:
        keys = [k for k in entry["keys"] if not k.startswith("constants.") or k in own]
        if keys:
            listed.append({**entry, "keys": keys})
    table["provenance"] = listed
    return table


def changed_keys(before: Device, after: Device) -> tuple[str, ...]:
    """Keys of the figures whose provenance differs, and of the constants whose value does."""
    values = {f"constants.{key}": value for key, value in before.constants.items()}
    return tuple(
        key
        for key, known in after.provenance.items()
        if before.provenance.get(key) != known
        or values.get(key) != after.constants.get(key.removeprefix("constants."))
    )


def write_device(path: Path, table: dict[str, Any], comment: str) -> None:
    """The table as TOML, whole or not at all, numbers to six digits."""
    text = "".join(f"# {line}\n" for line in comment.splitlines()) + tomli_w.dumps(_rounded(table))
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _pruned(tree: dict[str, Any], kept: Collection[str], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            if inner := _pruned(value, kept, f"{key}."):
                found[name] = inner
        elif key in kept:
            found[name] = value
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value
