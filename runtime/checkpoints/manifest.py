"""`manifest.json`: what a checkpoint holds and where, with checksums. JSON alone: reading it runs nobody's code.

schema, written_by, step, world_size
identity      hashes of model and dataset
extra         what the caller wants back: ledger, schedule of the learning rate, …
files         by name: bytes, crc32
tensors       by name: dtype, size, and chunks: offsets, sizes, file, start (in bytes)
values        by name: what is no tensor, as `encoded`
sha256        of all the rest
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoparallel.errors import UserError

NAME = "manifest.json"
SCHEMA = 1


class CheckpointDamaged(ValueError):
    """A checkpoint that is not what was written: the message names it, and the file."""


def encoded(value: Any, *, name: str, allow_pickle: bool) -> Any:
    """`value` as JSON: tuples, and what only pickle keeps (where it is allowed), are marked. Raises UserError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        items = [encoded(item, name=name, allow_pickle=allow_pickle) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [
            [encoded(part, name=name, allow_pickle=allow_pickle) for part in pair] for pair in value.items()
        ]
        return {"map": pairs}
    if allow_pickle:
        return {"pickle": base64.b64encode(pickle.dumps(value)).decode()}
    raise UserError(
        f"{name} is a {type(value).__name__}, which JSON does not hold: give numbers, texts, lists and dicts of them or "
        "tensors, or Checkpoints(allow_pickle=True)"
    )


def decoded(value: Any, *, name: str, allow_pickle: bool) -> Any:
    """Inverse of `encoded`. Raises UserError for a pickle that is not allowed."""
    if isinstance(value, list):
        return [decoded(item, name=name, allow_pickle=allow_pickle) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tuple":
        return tuple(decoded(held, name=name, allow_pickle=allow_pickle))
    if kind == "map":
        return dict(decoded(held, name=name, allow_pickle=allow_pickle))
    if not allow_pickle:
        raise UserError(
            f"{name} was saved as a pickle, and reading one may run anybody's code: if you trust who wrote it, "
            "Checkpoints(allow_pickle=True)"
        )
    return pickle.loads(base64.b64decode(held))


def as_json(given: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """What is given, where JSON holds it. Raises UserError where it does not."""
    try:
        json.dumps(given := dict(given), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} is nothing that JSON holds ({error}): give numbers, texts, lists and dicts"
        ) from None
    return given


def text_of(manifest: Mapping[str, Any]) -> str:
    """The file's text."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)


def read_text(path: Path) -> str:
    """The text of the manifest of the checkpoint in `path`. Raises CheckpointDamaged."""
    try:
        return (path / NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"{path}: {NAME} cannot be read ({error})") from None


def parsed(text: str, path: Path) -> dict[str, Any]:
    """The manifest in `text`. Raises CheckpointDamaged; UserError for one of a newer version."""
    try:
        manifest = json.loads(text)
        schema, digest = manifest["schema"], manifest.pop("sha256")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{path}: {NAME} is damaged ({error})") from None
    if digest != _digest(manifest):
        raise CheckpointDamaged(f"{path}: {NAME} is damaged (its checksum differs)")
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(
            f"{path} was written by a newer version ({manifest.get('written_by')}, schema {schema}; this one reads up to "
            f"{SCHEMA}): update this installation, or give this run another folder"
        )
    return dict(manifest)


def check_identity(manifest: Mapping[str, Any], identity: Mapping[str, str], path: Path) -> None:
    """Refuse a checkpoint of another model or dataset. Raises UserError."""
    for what, own in identity.items():
        held = manifest["identity"].get(what)
        if held is not None and held != own:
            raise UserError(
                f"{path} was written with another {what} (hash {held}, now {own}): go on with the one it was written "
                f'with, give this run another folder, or go on all the same with Trainer(accept=("{what}",)) (of Checkpoints: leave '
                f"it out of identity=)"
            )


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
