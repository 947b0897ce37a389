from __future__ import annotations

import torch

from autoparallel.runtime.check.live_bytes import LiveBytes

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
    assert not found.scores
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


def test_attention_with_its_scores_whole_is_noticed() -> None:
    query = torch.randn(1, 2, 8, 4)
    with LiveBytes() as live:
        live.begin()
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert not live.end().scores
        torch.softmax(query @ query.transpose(-1, -2), -1)
        assert live.end().scores
