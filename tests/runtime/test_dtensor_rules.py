"""Rules of DTensor that torch lacks, or has wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autoparallel.runtime.tensor.dtensor_rules import register_missing_rules
from autoparallel.runtime.tensor.functions import TensorParallel
from autoparallel.runtime.torch_private import as_one_of

_efficient = torch.ops.aten._scaled_dot_product_efficient_attention


def _heads(mesh: DeviceMesh, *shape: int) -> DTensor:
    return DTensor.from_local(torch.randn(2, 3, *shape, requires_grad=True), mesh, [Shard(1)])


def test_attention_gives_its_bias_a_gradient_also_after_a_call_that_asked_for_none() -> None:
    register_missing_rules()
    with as_one_of(2):
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode():
            _attends(mesh)


def _attends(mesh: DeviceMesh) -> None:
    for wanted in (False, True, False, True):
        query, key, value = (_heads(mesh, 16, 8) for _ in range(3))
        bias = _heads(mesh, 16, 16).detach().requires_grad_(wanted)
        _efficient(query, key, value, bias, True, 0.0, False)[0].sum().backward()
        assert (bias.grad is not None) == wanted


def test_a_share_laid_out_otherwise_than_the_whole_can_be_seen_in_another_shape() -> None:
    register_missing_rules()
    with as_one_of(2):
        mesh = init_device_mesh("cpu", (2,))
        share = torch.randn(2, 4, 6).transpose(1, 2)  # of a gradient whose whole is contiguous, says DTensor
        whole = DTensor.from_local(share.contiguous(), mesh, [Shard(1)])
        whole._local_tensor = share
        seen = whole.view(24, 4).to_local()
        assert torch.equal(seen, share.reshape(12, 4))


def test_a_vector_times_shares_of_a_weight_is_a_vector() -> None:
    register_missing_rules()
    with as_one_of(2), TensorParallel(in_shares=False):
        mesh = init_device_mesh("cpu", (2,))
        vector = DTensor.from_local(torch.randn(4), mesh, [Shard(0)])
        weight = DTensor.from_local(torch.randn(6, 4), mesh, [Shard(1)])
        product = F.linear(vector, weight)
        assert product.shape == product.to_local().shape == (6,)
