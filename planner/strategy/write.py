"""Write a strategy file: readable, the same bytes for the same plan, and never half a file.

TOML has no writer that keeps comments and short lists on one line, so tables are laid out here; every value
is a TOML literal, and `tomllib` reads back exactly what was written.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoparallel.errors import UserError
from autoparallel.planner.strategy.schema import SCHEMA, SECTIONS, comment_of
from autoparallel.planner.strategy.stacks import as_stated
from autoparallel.planner.strategy.types import (
    SAYS_NOTHING,
    EmbeddingRule,
    Execution,
    Phase,
    Strategy,
    TensorRule,
)

UNSAID = (
    "seq_len",
    "placement",
    "per_node",
)  # keys left out where they say nothing: of one length, on regular clusters
_COMMENT_COLUMN = 34
_LINE_WIDTH = 100  # longer lists are broken, one item a line


def write_strategy(
    path: str | Path,
    strategy: Strategy,
    problem: Mapping[str, Any],
    predicted: Mapping[str, Any],
    search: Mapping[str, Any],
) -> None:
    """Write a complete strategy file atomically: the old file or the new one, never a part of either.

    `problem`, `predicted` and `search` are plain data (see the file format). Raises UserError where the path
    cannot be written.
    """
    write_text(path, strategy_text(strategy, problem, predicted, search))


def strategy_text(
    strategy: Strategy,
    problem: Mapping[str, Any],
    predicted: Mapping[str, Any],
    search: Mapping[str, Any],
) -> str:
    """The text of a strategy file. The long tables (search, a cluster that is not only named) stand at the end."""
    cluster = problem.get("cluster") or {}
    whole = "group" in cluster
    head = {key: value for key, value in problem.items() if key != "cluster" or not whole}
    parts = [
        "# Written by `autoparallel plan`. Keys may be edited or left out: what is here is a constraint,\n"
        "# what is missing is chosen. `autoparallel score` prices an edited file; its [predicted] is then of another.\n"
        f"schema = {SCHEMA}\n{_no_tensor_entries(strategy)}",
        _table("problem", head, "what it was planned for; refused when it does not match"),
    ]
    for section in SECTIONS:
        part = getattr(strategy, section)
        if part not in SAYS_NOTHING:
            parts.append(_strategy_section(section, part))
    parts.extend(_tensor_entry(rule) for rule in strategy.tensor)
    parts.extend(_embedding_entry(rule) for rule in strategy.embedding)
    parts.extend(_phase_entry(phase) for phase in strategy.phases)
    parts.append(_table("predicted", predicted, "what the cost model says of it"))
    parts.append(_table("search", search, "how it was found, and what was rejected"))
    if whole:
        parts.append(_cluster_table(cluster))
    return "\n".join(part for part in parts if part)


def _no_tensor_entries(strategy: Strategy) -> str:
    """Tensor parallelism that shards nothing is a decision too: without it the file would leave it open."""
    sharded = strategy.mesh.tp == 1 or strategy.tensor
    return "" if sharded else "tensor = []                        # nothing is sharded over tp\n"


def write_text(path: str | Path, text: str, *, remedy: str = "give another path with -o") -> None:
    """Write text by way of a file beside it that is then renamed. Raises UserError, which says a `remedy`."""
    target = Path(path)
    try:
        if _is_special(target):  # a pipe or a device: must not be replaced by a file
            target.write_text(text, encoding="utf-8")
            return
        target = target.resolve()
        descriptor, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
            os.chmod(aside, mode)
            os.replace(aside, target)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {remedy}") from None


def check_writable(path: str | Path, *, read: Iterable[str | Path] = ()) -> None:
    """Raise UserError where `write_text` would fail, or write over one of the files that are `read` for it, without
    touching what is there.

    Creates and removes an empty file beside it, since permissions alone do not tell (read-only mounts).
    """
    target = Path(path)
    if target.is_dir():
        raise UserError(f"{path}: is a folder; give a file name with -o")
    if any(_same_file(target, one) for one in read):
        raise UserError(f"{path}: is what this is made from; give another path with -o")
    parent = target.resolve().parent
    if not parent.is_dir():
        raise UserError(f"{path}: cannot be written, there is no folder {parent}; create it first")
    if target.exists() and not os.access(target, os.W_OK):
        raise UserError(f"{path}: cannot be written (no permission); give another path with -o")
    if _is_special(target):
        return
    try:
        descriptor, aside = tempfile.mkstemp(dir=parent, prefix=".autoparallel-")
        os.close(descriptor)
        Path(aside).unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another path with -o") from None


def _same_file(target: Path, other: str | Path) -> bool:
    try:
        return target.samefile(other)
    except OSError:  # one of them is not there, or no path
        return False


def _is_special(target: Path) -> bool:
    return target.exists() and not target.is_file()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _strategy_section(section: str, part: Any) -> str:
    lines = [f"[{section}]"]
    unsaid = as_stated(part) if isinstance(part, Execution) else ()
    for f in fields(part):
        key = f.name.rstrip("_")
        if f.name in unsaid or (f.name in UNSAID and not getattr(part, f.name)):
            continue
        value = getattr(part, f.name)
        line = f"{key} = {literal(dict(value) if key == 'tables' else value)}"
        comment = comment_of(section, key)
        lines.append(f"{line:<{_COMMENT_COLUMN}} # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _tensor_entry(rule: TensorRule) -> str:
    lines = ["[[tensor]]", f"module = {literal(rule.module)}"]
    if rule.params:
        lines.append(f"params = {literal(dict(rule.params))}")
    if rule.inputs:
        lines.append(f"inputs = {literal(dict(rule.inputs))}")
    if rule.outputs:
        lines.append(f"outputs = {literal(rule.outputs)}")
    return "\n".join(lines) + "\n"


def _phase_entry(phase: Phase) -> str:
    lines, sections = ["[[phase]]", f"from_step = {phase.from_step}"], dict[str, dict[str, object]]()
    for key, value in phase.keys:
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return "\n".join([*lines, *(f"{section} = {literal(keys)}" for section, keys in sections.items())]) + "\n"


def _embedding_entry(rule: EmbeddingRule) -> str:
    lines = ["[[embedding]]", f"module = {literal(rule.module)}"]
    lines += [f"tier = {literal(rule.tier)}"] if rule.tier is not None else []
    lines += [f"hot_rows = {rule.hot_rows}"] if rule.hot_rows is not None else []
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, Any], comment: str = "") -> str:
    """A table with its sub-tables; empty text for an empty table."""
    if not values:
        return ""
    return _filled(f"[{name}]" + (f"  # {comment}" if comment else ""), name, values)


def _cluster_table(cluster: Mapping[str, Any]) -> str:
    """`[problem.cluster]`: a line for each table of figures, and for each source."""
    keys = {key: value for key, value in cluster.items() if key not in ("group", "level", "provenance")}
    lines = ["[problem.cluster]  # the machines, with every figure that does not ship"]
    lines += [f"{_key(key)} = {_wrapped(value)}" for key, value in keys.items()]
    lines += _sources(cluster)
    for group in cluster["group"]:
        device = group["device"]
        lines += ["", "[[problem.cluster.group]]"]
        lines += [
            f"{_key(key)} = {literal(value)}"
            for key, value in group.items()
            if key != "device" or not isinstance(device, Mapping)
        ]
        if isinstance(device, Mapping):
            lines += ["[problem.cluster.group.device]"]
            lines += [
                f"{_key(key)} = {literal(value)}"
                for key, value in device.items()
                if key not in ("constants", "provenance")
            ]
            lines += _sources(device)
            if constants := device.get("constants"):
                lines += ["[problem.cluster.group.device.constants]"]
                lines += [f"{_key(key)} = {literal(value)}" for key, value in constants.items()]
    for level in cluster.get("level", ()):
        lines += ["", "[[problem.cluster.level]]", *(f"{_key(k)} = {literal(v)}" for k, v in level.items())]
    return "\n".join(lines) + "\n"


def _sources(table: Mapping[str, Any]) -> list[str]:
    found = table.get("provenance", ())
    return ["provenance = [", *(f"  {literal(one)}," for one in found), "]"] if found else []


def _filled(header: str, name: str, values: Mapping[str, Any]) -> str:
    lines, nested = [header], []
    for key, value in values.items():
        child = f"{name}.{_key(key)}"
        if isinstance(value, Mapping) and not _is_short(value):
            nested.append(_filled(f"[{child}]", child, value))
        elif isinstance(value, list | tuple) and _is_table_array(value):
            nested.extend(_filled(f"[[{child}]]", child, item) for item in value)
        elif value is not None:
            lines.append(f"{_key(key)} = {_wrapped(value)}")
    return "\n".join(["\n".join(lines) + "\n", *nested])


def _is_table_array(value: Sequence[Any]) -> bool:
    """Tables in a list get a heading each where they hold more than fits on a line."""
    return (
        bool(value)
        and all(isinstance(item, Mapping) for item in value)
        and any(isinstance(inner, Mapping | list | tuple) for item in value for inner in item.values())
    )


def _is_short(value: Mapping[str, Any]) -> bool:
    """A figure with its kind and source, or anything as small, stays on its line."""
    flat = not any(isinstance(item, Mapping | list | tuple) for item in value.values())
    return flat and (not value or "value" in value or len(literal(value)) <= _LINE_WIDTH)


def _wrapped(value: Any) -> str:
    text = literal(value)
    if isinstance(value, list | tuple) and value and len(text) > _LINE_WIDTH:
        return "[\n" + "".join(f"  {literal(item)},\n" for item in value) + "]"
    return text


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else literal(key)


def literal(value: object) -> str:
    """A TOML literal: strings, booleans, numbers, lists and inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(k))} = {literal(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(literal(item) for item in value)}]"
    raise AssertionError(f"no TOML form of {type(value).__name__}")
