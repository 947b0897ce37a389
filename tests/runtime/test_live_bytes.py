from __future__ import annotations

import torch

from autoparallel.runtime.check.device_kernels import DeviceKernels
from autoparallel.runtime.check.live_bytes import LiveBytes
from autoparallel.runtime.torch_private import fake_tensors

KIB = 1024


def kib(size: int) -> torch.Tensor:
    return torch.zeros(size * KIB, dtype=torch.uint8)


def test_each_storage_counts_once_until_nothing_holds_it() -> None:
    before = kib(4)
    with LiveBytes(lambda: "here") as live:
        live.begin()
        first = kib(8)
        views = [first.view(2, -1), first[1:], before[1:], before.add_(1)]
        second = kib(2)
        del first, views
        third = kib(1)
        found = live.end()
    assert (found.begin, found.kept, found.peak) == (0, 3 * KIB, 10 * KIB)
    assert found.module == "here"
    del second, third


def test_storages_that_are_emptied_and_filled_again_count_as_they_stand() -> None:
    with LiveBytes() as live, live.watching_sizes():
        whole = kib(8)
        whole.untyped_storage().resize_(0)
        assert live.now == 0
        live.begin()
        whole.untyped_storage().resize_(8 * KIB)
        assert (live.end().begin, live.end().kept) == (0, 8 * KIB)
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_attention_with_dropout_or_a_mask_keeps_statistics_and_no_scores() -> None:
    length, heads = 256, 2
    for given in ({"dropout_p": 0.1}, {"attn_mask": torch.ones(1, 1, 1, length, dtype=torch.bool)}):
        with fake_tensors(), DeviceKernels(flash=True), LiveBytes() as live:
            query = torch.empty(1, heads, length, 4, requires_grad=True)
            mask = {
                name: torch.empty_like(v) if isinstance(v, torch.Tensor) else v for name, v in given.items()
            }
            live.begin()
            result = torch.nn.functional.scaled_dot_product_attention(query, query, query, **mask)
            assert live.end().kept < heads * length * length, "not a byte for each score"
            result.sum().backward()


def test_attention_inside_of_torch_s_multi_head_attention_keeps_no_scores() -> None:
    length, heads, width = 256, 2, 8
    with fake_tensors(), DeviceKernels(flash=True), LiveBytes() as live:
        attention = torch.nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        hidden = torch.empty(1, length, width, requires_grad=True)
        live.begin()
        result, _ = attention(hidden, hidden, hidden, need_weights=False)
        assert live.end().kept < heads * length * length, "not a byte for each score"
        result.sum().backward()


def test_dropout_keeps_a_byte_for_each_number() -> None:
    with fake_tensors(), DeviceKernels(flash=True), LiveBytes() as live:
        given = torch.empty(KIB, requires_grad=True)
        live.begin()
        result = torch.nn.functional.dropout(given, 0.1)
        assert live.end().kept == (given.element_size() + 1) * KIB
        assert torch.nn.functional.dropout(given, 0.1, training=False) is given
        result.sum().backward()
