"""What is wrong with a strategy file, in words: file, table, key, what was found, what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from autoparallel.costmodel.kernels import DTYPE_ALIASES
from autoparallel.planner.strategy.schema import (
    SECTIONS,
    EmbeddingEntry,
    ProblemSection,
    Section,
    StrategySchema,
    TensorEntry,
    keys_of,
)

_TYPE_NAMES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "finite_number": "a finite number",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean …' with the closest of `known`, or the list of them where none is close."""
    candidates = list(known)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.55)
    if close:
        return f'did you mean "{close[0]}"?'
    tails = [c for c in candidates if c.split(".")[-1] == word.split(".")[-1]]
    if tails:
        return f'did you mean "{tails[0]}"?'
    return f"known are {', '.join(candidates)}"


def explain_validation(error: ValidationError, name: str) -> str:
    """One line per mistake, each with the file, the key, what was found and what to try."""
    return "\n".join(_explain(dict(item), name) for item in error.errors(include_url=False))


def _explain(item: Mapping[str, Any], name: str) -> str:
    location: tuple[int | str, ...] = item["loc"]
    where = f"{name}: {_show_location(location)}"
    kind, context, found = item["type"], item.get("ctx") or {}, item.get("input")
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {_suggest(location)}"
    if kind == "missing":
        return f"{where}: is missing"
    if kind in _TYPE_NAMES:
        return f"{where} = {_show(found)} must be {_TYPE_NAMES[kind]}"
    if kind == "literal_error":
        options = [part.strip("' ") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        return f"{where} = {_show(found)} is not known; {_one_of(found, options)}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{where} = {_show(found)} must be {words} {_show_bound(context[key])}"
    if kind == "string_pattern_mismatch":
        return f"{where} = {_show(found)} is not known; use {_pattern_help(location)}"
    return f"{where} = {_show(found)}: {item['msg']}"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)


def _show_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _one_of(found: object, options: list[str]) -> str:
    known = ", ".join(options)
    alias = DTYPE_ALIASES.get(str(found), "")
    close = [alias] if alias in options else difflib.get_close_matches(str(found), options, n=1)
    return f'did you mean "{close[0]}"? (one of {known})' if close else f"use one of {known}"


def _pattern_help(location: tuple[int | str, ...]) -> str:
    if location[0] == "tensor":
        return "replicate, partial, shard(DIM) or shard(DIM, strided PARTS)"
    return "none, fp16, bf16, fp8, int8, int4, int2, sign, topk:RATIO or powersgd:RANK"


def _show_location(location: tuple[int | str, ...]) -> str:
    if len(location) == 1:
        key = str(location[0])
        return f"[{key}]" if key in StrategySchema.model_fields and key != "schema" else key
    first, *rest = location
    head = str(first)
    table = f"[[{head}]]" if head in ("tensor", "embedding") else f"[{head}]"
    text = table
    for step in rest:
        text += f" entry {step + 1}" if isinstance(step, int) else f" {step}"
    return text


def _suggest(location: tuple[int | str, ...]) -> str:
    word = str(location[-1])
    if len(location) == 1:
        tables = [*SECTIONS, "tensor", "embedding", "problem", "schema"]
        for table, section in SECTIONS.items():
            if word in keys_of(section):
                return f'"{word}" belongs under [{table}]'
        return nearest(word, tables)
    head = str(location[0])
    sections: dict[str, type[Section]] = {
        **SECTIONS, "problem": ProblemSection, "tensor": TensorEntry, "embedding": EmbeddingEntry,
    }  # fmt: skip
    own = list(keys_of(sections[head]))
    if not difflib.get_close_matches(word, own, n=1, cutoff=0.55):
        for table, other in SECTIONS.items():
            if word in keys_of(other):
                return f'"{word}" belongs under [{table}]'
    return nearest(word, own)
