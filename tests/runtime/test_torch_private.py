from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random as random

from autoparallel.runtime import torch_private


def test_this_torch_is_one_whose_private_names_were_read() -> None:
    major_minor = ".".join(torch.__version__.split(".")[:2])
    assert major_minor in torch_private.TORCH_VERSIONS


def test_traced_code_sees_the_answer_it_is_given_and_the_old_one_comes_back() -> None:
    kind = torch._subclasses.FakeTensor
    assert not torch.compiler.is_exporting()
    with torch_private.traced_as(eager=False):
        assert torch.compiler.is_exporting()
        assert torch.compiler.is_compiling()
        with torch_private.traced_as(eager=True):
            assert not torch.compiler.is_exporting()
            assert not torch.compiler.is_compiling()
            assert torch._subclasses.FakeTensor is not kind
        assert torch.compiler.is_exporting()
    assert not torch.compiler.is_exporting()
    assert torch._subclasses.FakeTensor is kind


def test_outside_tracing_operators_run_on_real_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        assert isinstance(torch.ones(2), torch._subclasses.FakeTensor)
        with torch_private.outside_tracing():
            assert torch.ones(2).sum().item() == 2.0


def test_a_callback_runs_once_when_the_backward_pass_ends() -> None:
    calls: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    for tensor in (x, y):
        tensor.register_hook(lambda _: torch_private.after_backward(lambda: calls.append("end")))
    (x * y).sum().backward()
    assert calls == ["end", "end"]


def test_dtensor_draws_on_accelerators_without_asking_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SimpleNamespace] = []
    mesh: Any = SimpleNamespace()

    def tracker(_: Any, **options: Any) -> SimpleNamespace:
        made.append(SimpleNamespace(_device="of another rank", **options))
        return made[-1]

    monkeypatch.setattr(random, "_rng_tracker", None)
    monkeypatch.setattr(random, "is_rng_supported_mesh", lambda mesh: True)
    monkeypatch.setattr(random, "OffsetBasedRNGTracker", tracker)
    torch_private.draw_without_broadcast(mesh, torch.device("cpu"))
    assert not made
    for _ in range(2):
        torch_private.draw_without_broadcast(mesh, torch.device("cuda", 3))
    assert made == [SimpleNamespace(_device=torch.device("cuda", 3), run_state_sync=False)]
    assert random._rng_tracker is made[0]


def test_no_name_of_torch_distributed_is_called_that_warns_the_user() -> None:
    """Ours or torch's own deprecations reach the terminal of whoever trains."""
    called = {
        (path.name, node.attr)
        for path in Path(torch_private.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed")
    }
    assert len(called) > 50
    assert not [one for one in called if hasattr(getattr(dist, one[1], None), "__deprecated__")]
    if hasattr(dist, "all_gather_single"):  # such names are known by their mark
        assert hasattr(dist.all_gather_into_tensor, "__deprecated__")
