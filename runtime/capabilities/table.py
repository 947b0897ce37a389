"""What of a strategy runs here, and beside what: the one table that planning, lowering and the pages read. Imports no torch.

A row names a key of the strategy file, the values that it is about, what else must hold for them, why, and what to write
instead. `refusals` says what of a strategy is refused, in the words in which `auto_parallelize` refuses it before anything is
sharded and `plan` reports it; `limits` turns the rows into constraints of a search (`plan --runnable`); `page` is the table of
docs/runtime.md. A row that is only `said` runs, with other figures than were priced: searches leave it out, a run warns of it.

What depends on the module itself (a layout for a parameter that it does not have) is refused where the module is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autoparallel.errors import UserError
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.strategy.phases import starts, strategy_at
from autoparallel.runtime.capabilities.grad_sync import ROWS
from autoparallel.runtime.capabilities.rows import Case, Row, holds_in, in_tiers, only_with, shown

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")
UNSHARABLE = ("mesh.ep", "mesh.cp")  # axes along which experts are shared, or their tokens
_CALLED_OTHERWISE = (
    "a layer of experts is not called with activations, the experts chosen and their weights, which the runtime needs to send "
    "tokens to them"
)
_WHOLE_SEQUENCE = (
    "a layer of experts that is called in a way that is not known runs on the gathered sequence, on every rank alike, which is "
    "not priced"
)
_OTHER_SOFTWARE = {
    "async_tp": "does not run asynchronous tensor parallelism yet",
    "async_gradients": "does not run asynchronous tensor parallelism yet",
    "blocking_sends": "has stages that do not wait",
    "kept_outputs": "frees what a stage has sent",
    "blocking_launches": "does not wait for each kernel",
    "parameter_gathers": "gathers whole blocks",
    "hidden_dispatch": "computes one micro-batch at a time",
    "merged_dispatch": "sends a token to each expert",
}


def _unsharable(axis: str, why: str) -> Callable[[Case], Iterator[str]]:
    def found(case: Case) -> Iterator[str]:
        size = getattr(case.strategy.mesh, axis)
        if size > 1 and not case.shares_experts:
            yield f"mesh.{axis} = {size}: {why}; set mesh.{axis} to 1"

    return found


TABLE: tuple[Row, ...] = (
    Row(
        key="mesh.ep", values="above 1", holds="layers of experts are called with activations, experts and weights",
        why=_CALLED_OTHERWISE, found=_unsharable("ep", _CALLED_OTHERWISE),
    ),
    Row(
        key="mesh.cp", values="above 1", holds="layers of experts are called so",
        why=_WHOLE_SEQUENCE, found=_unsharable("cp", _WHOLE_SEQUENCE), said=True,
    ),
    only_with(
        "pipeline.schedule", tuple(sorted(SPLIT_BACKWARD)), ({"execution.kernels": ("eager", "fused")},),
        holds='`execution.kernels = "eager"`',
        why="a compiled block computes all gradients at once: its backward would run twice",
        instead='use 1f1b or interleaved-1f1b, or kernels = "eager"',
    ),
    only_with(
        "execution.dtype", lambda value: value not in DTYPES, (), words='"fp8", "mxfp8", "nvfp4"', holds="",
        why="the runtime has no products of eight or four bits", instead=f"choose one of {', '.join(DTYPES)}",
    ),
    only_with(
        "execution.kernels", ("fused",), (), holds="your modules have such kernels", said=True,
        why="the module runs with the kernels that it has, and others are priced",
        instead='write "eager" or "compiled" for a prediction of what runs',
    ),
    only_with(
        "execution.kernels", ("compiled",), ({"mesh.tp": (1,), "mesh.cp": (1,)},), holds="`mesh.tp = 1`, `mesh.cp = 1`",
        why="the runtime does not compile blocks that compute on shards yet", instead='write "eager"',
    ),
    only_with(
        "recompute.mode", ("operators",), ({"execution.kernels": ("eager", "fused")},), holds='`execution.kernels = "eager"`',
        why="compiled blocks choose themselves what they keep", instead='use selective or full, or kernels = "eager"',
    ),
    *(
        only_with(
            f"execution.{flag}", (True,), (), holds="", why=f"the runtime {instead}", instead="set it to false",
        )
        for flag, instead in _OTHER_SOFTWARE.items()
    ),
    *ROWS,
    *(
        only_with(
            "embedding", in_tiers, ({f"mesh.{axis}": (1,)},), words='tiers other than "device"', holds=f"`mesh.{axis} = 1`",
            why="the runtime asks for rows from data-parallel ranks alone", instead='set it to 1, or tier = "device"',
        )
        for axis in ("pp", "tp", "cp", "ep")
    ),
)  # fmt: skip


def refusals(case: Case, *, said: bool = False) -> Iterator[str]:
    """What of a strategy is not run, in any of its phases, key, value and remedy; nothing where all of it is. With `said` also
    what runs at another price."""
    whole = case.strategy
    for step in starts(whole):
        own = replace(case, strategy=strategy_at(whole, step)) if whole.phases else case
        where = f"from step {step}: " if step > 1 else ""
        yield from (
            f"{where}{problem}" for row in TABLE if said or not row.said for problem in row.found(own)
        )


def check_capabilities(case: Case) -> None:
    """Raises UserError with the first of `refusals`."""
    for problem in refusals(case):
        raise UserError(problem)


def otherwise_priced(case: Case) -> tuple[str, ...]:
    """What of a strategy runs with other figures than were priced."""
    return tuple(problem for row in TABLE if row.said for problem in row.found(case))


def limits(constraints: Mapping[str, object], *, said: bool = False) -> dict[str, object]:
    """The constraints, by dotted key, without which nothing that `constraints` ask for runs; where several values would do, the
    search chooses among them (`refusals` leaves out the others), and of `[execution]`, which is not searched, the first is
    taken. Raises UserError where nothing that they leave open would run."""
    found: dict[str, object] = {}
    for row in TABLE:
        if row.key not in constraints or not row.asked(constraints[row.key]) or (row.said and not said):
            continue
        known = {**found, **constraints}
        if any(holds_in(need, known) for need in row.needs):
            continue
        left = [n for n in row.needs if all(known[k] in allowed for k, allowed in n.items() if k in known)]
        if not left:
            fixed = {
                k: known[k]
                for need in row.needs
                for k, allowed in need.items()
                if known.get(k, allowed[0]) not in allowed
            }
            beside = " and ".join(shown(k, value) for k, value in fixed.items())
            also = f" with {beside}" if beside else ""
            raise UserError(f"{shown(row.key, constraints[row.key])}{also}: {row.why}; {row.instead}")
        if len(left) == 1:
            found |= {
                k: allowed[0]
                for k, allowed in left[0].items()
                if k not in known and (len(allowed) == 1 or k.startswith("execution."))
            }
    return found


def page() -> str:
    """The table as docs/runtime.md has it."""
    lines = ["| key | values | run where | else |", "|---|---|---|---|"]
    for row in TABLE:
        key = "[[embedding]]" if row.key == "embedding" else row.key
        what = f"{row.why} (not refused: a run warns)" if row.said else row.why
        lines.append(f"| `{key}` | {row.values} | {row.holds or 'nowhere'} | {what} |")
    return "\n".join(lines) + "\n"
