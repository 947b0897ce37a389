from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.costmodel.program_check import ProgramError, check
from autoparallel.costmodel.program_text import ProgramTextError, grid, parse, show

TWO_RANKS = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP\n"
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP"
)

WITHOUT_MICRO = (ActionKind.REDUCE_GRAD, ActionKind.STEP)
ACTIONS = st.one_of(
    st.builds(Action, st.integers(0, 99), st.sampled_from(WITHOUT_MICRO)),
    st.builds(
        Action,
        st.integers(0, 99),
        st.sampled_from([kind for kind in ActionKind if kind not in WITHOUT_MICRO]),
        st.integers(0, 999),
    ),
)


@given(st.lists(st.lists(ACTIONS, max_size=8).map(tuple), min_size=1, max_size=4).map(tuple))
def test_text_round_trips(ranks: tuple[tuple[Action, ...], ...]) -> None:
    assert parse(show(ranks)) == ranks


def test_text_of_a_program_is_one_line_a_rank() -> None:
    assert show(parse(TWO_RANKS)) == TWO_RANKS
    assert parse("2F0 0STEP") == ((Action(2, ActionKind.FORWARD, 0), Action(0, ActionKind.STEP)),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("F0", "expected STAGE KIND MICRO-BATCH"),
        ("0X0", "kinds are"),
        ("0F", "needs a micro-batch"),
        ("0STEP1", "takes no micro-batch"),
        ("0F0,0B0", "expected"),
    ],
)
def test_what_is_not_a_program_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(ProgramTextError, match=says):
        parse(text)


def test_a_complete_program_passes_the_check() -> None:
    check(parse(TWO_RANKS))
    check(parse("0F0 0B0 0F1 0I1 0W1 0REDUCE_GRAD 0STEP"))


@pytest.mark.parametrize(
    ("text", "says", "marked"),
    [
        ("0B0 0F0 0REDUCE_GRAD 0STEP", "backward before forward", ">0B0<"),
        ("0F0 0F0 0B0 0REDUCE_GRAD 0STEP", "done twice", ">0F0<"),
        ("0F0 0B0 0I0 0W0 0REDUCE_GRAD 0STEP", "both B and I", ">0I0<"),
        ("0F0 0W0 0I0 0REDUCE_GRAD 0STEP", "W before I", ">0W0<"),
        ("0F0 0I0 0REDUCE_GRAD 0STEP", "0W0 is missing", ">0STEP<"),
        ("0F0 0B0 0F1 0REDUCE_GRAD 0STEP", "0B1 is missing", ">0STEP<"),
        ("0F0 0B0 0STEP", "STEP before REDUCE_GRAD", ">0STEP<"),
        ("0F0 0REDUCE_GRAD 0B0 0STEP", "after the gradients", ">0B0<"),
        ("0F0 0B0 0REDUCE_GRAD 0STEP 0F1", "only STEPs", ">0F1<"),
        ("0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP", "no next stage", ">0SEND_F0<"),
        ("1F0 0F0 0B0 1B0 0REDUCE_GRAD 1REDUCE_GRAD 0STEP 1STEP", "has made its input", ">1F0<"),
        (TWO_RANKS.replace("1RECV_F0 ", ""), "before its input was received", ">1F0<"),
        (TWO_RANKS.replace("0F0 0SEND_F0", "0SEND_F0 0F0"), "sent before it is computed", ">0SEND_F0<"),
        (TWO_RANKS.replace("0SEND_F1 ", ""), "which never comes: deadlock", ">1RECV_F1<"),
        (TWO_RANKS.replace("1RECV_F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1"), "deadlock", ">0SEND_F1<"),
        (TWO_RANKS.replace("1F1", "0F1", 1), "already stands on rank 0", ">0F1<"),
        ("1F0 1B0 1REDUCE_GRAD 1STEP", r"stages \[0\] stand on no rank", "give each stage"),
    ],
)
def test_a_broken_program_is_shown_with_the_bad_step_marked(text: str, says: str, marked: str) -> None:
    with pytest.raises(ProgramError, match=says) as error:
        check(parse(text))
    assert marked in str(error.value)


def test_grid_shows_only_the_rows_around_the_bad_step() -> None:
    text = grid(parse(" ".join(f"0F{i}" for i in range(40))), bad=(0, 20), reason="why", around=2)
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "",
        "…",
        *(f"step {i}" for i in range(18, 23)),
        "…",
    ]
    assert ">0F20<   <-- why" in text
