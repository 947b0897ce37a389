"""Tables of kernels: read back as written, and a device made of one prices its kernels."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.fit import Sample, with_constants
from autoparallel.costmodel.fit_table import HALF, fit_table
from autoparallel.costmodel.kernel_table import (
    KernelRow,
    kernel_table,
    parse_kernel_row,
    read_kernel_table,
)
from autoparallel.costmodel.kernels import device_s
from autoparallel.errors import UserError
from autoparallel.profiles import load_device
from benchmarks.tables import judged

BASE = load_device("h100-sxm")
SIZES = st.integers(1, 9000)
PRODUCT = st.builds(
    lambda m, n, k, batch, dtype: {
        "op": "matmul", "m": str(m), "n": str(n), "k": str(k), "batch": str(batch), "shape_key": f"dtype={dtype}",
        "accumulate": "False", "out_dtype": "bf16",
    },
    SIZES, SIZES, SIZES, st.integers(1, 8), st.sampled_from(["bf16", "fp16", "fp8"]),
)  # fmt: skip
ATTENTION = st.builds(
    lambda op, seq, heads: {
        "op": op,
        "shape_key": f"batch=1, seq_len={seq}, head_num={heads}, kv_head_num={heads}, qk_head_dim=128, v_head_dim=128",
    },
    st.sampled_from(["sdp_fwd", "sdp_bwd"]), SIZES, st.integers(1, 64),
)  # fmt: skip
MEMORY = st.builds(
    lambda kind, size: {"op": f"memory.{kind}", "shape_key": f"bytes={size}"},
    st.sampled_from(["norm", "copy", "optimizer", "softmax"]), st.integers(1, 10**10),
)  # fmt: skip
CELLS = st.one_of(PRODUCT, ATTENTION, MEMORY)


@given(rows=st.lists(st.tuples(CELLS, st.floats(1e-6, 1.0)), min_size=1, max_size=5))
def test_a_table_is_read_as_it_was_written(
    rows: list[tuple[dict[str, str], float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    said = [parse_kernel_row({**cells, "seconds": repr(seconds)}) for cells, seconds in rows]
    path = tmp_path_factory.mktemp("table") / "kernels.csv"
    path.write_text(kernel_table([row.sample for row in said], "NVIDIA H100 80GB HBM3", "here"))
    for before, after in zip(said, read_kernel_table(path), strict=True):
        assert (after.kernel, after.op, after.gpu) == (before.kernel, before.op, "NVIDIA H100 80GB HBM3")
        assert after.seconds == pytest.approx(before.seconds, rel=1e-5)


@settings(max_examples=5)
@given(products=st.floats(0.5, 0.95), forward=st.floats(0.4, 0.8), norms=st.floats(0.3, 0.9))
def test_the_constants_that_made_a_table_are_found_and_the_rest_follows(
    products: float, forward: float, norms: float
) -> None:
    truth = with_constants(
        BASE, {HALF: products, "attention.forward": forward, "memory.efficiency.norm": norms}
    )
    shapes = [
        {"op": "matmul", "batch": "1", "m": str(m), "n": str(n), "k": str(k), "seconds": "1"}
        for m, n, k in ((8192, 8192, 8192), (4096, 4096, 4096))
    ]
    key = "batch=2, seq_len=8192, head_num=32, kv_head_num=32, qk_head_dim=128, v_head_dim=128"
    shapes += [{"op": "sdp_fwd", "shape_key": key, "seconds": "1"}]
    shapes += [{"op": "memory.norm", "shape_key": "bytes=500000000", "seconds": "1"}]
    rows = [
        KernelRow(gpu="", op=r.op, kernel=r.kernel, seconds=device_s(r.kernel, truth, "fused"), origin="")
        for r in map(parse_kernel_row, shapes)
    ]
    found = fit_table(BASE, rows, source="made up")
    for key in (HALF, "attention.forward", "memory.efficiency.norm"):
        assert found.constants[key] == pytest.approx(truth.constants[key], rel=0.01), key
    ratio = found.constants[HALF] / BASE.constants[HALF]
    expected = min(1.0, ratio * BASE.constants["gemm.efficiency.fp8"])
    assert found.constants["gemm.efficiency.fp8"] == pytest.approx(expected)
    assert found.provenance["constants.gemm.efficiency.fp8"].kind == "formula"
    assert found.constants["memory.efficiency.copy"] == BASE.constants["memory.efficiency.copy"]


@pytest.mark.parametrize(
    ("gpu", "most"),
    [
        ("A100-PCIe 80GB", {"products": 0.032, "grouped": 0.04, "attention": 0.03}),
        ("B200-SXM", {"products": 0.095, "grouped": 0.12, "attention": 0.11}),
    ],
)
def test_half_of_a_published_table_makes_a_stranger_predict_the_other_half(
    gpu: str, most: dict[str, float]
) -> None:
    before, after = judged(gpu)
    assert all(after[kind] < before[kind] for kind in most), (before, after)
    assert all(after[kind] <= limit for kind, limit in most.items()), after


def test_what_several_kernels_or_hosts_took_is_no_row() -> None:
    row = parse_kernel_row({"op": "memory.norm", "shape_key": "bytes=10", "seconds": "1"})
    two = Sample(family="launch", label="", kernels=(row.kernel, row.kernel), seconds=1.0)
    assert list(csv.DictReader(kernel_table([two], "", "").splitlines())) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m,n\n1,2\n", "`op`"),
        ("op,speed\nmatmul,1\n", "unknown column `speed`"),
        ("op,seconds\nfft,1\n", "row 2: `op` = 'fft'"),
        ("op,m,n,k,batch,seconds\nmatmul,1,2,x,1,1\n", "row 2: `k` = 'x'"),
        ("op,m,n,k,batch,seconds\nmatmul,1,2,3,1,-1\n", "row 2: `seconds` = '-1'"),
        ("op,shape_key,seconds\nsdp_fwd,batch=1,1\n", "`shape_key seq_len`"),
        ("op,shape_key,efficiency\nmemory.norm,bytes=10,0.5\n", "needs `seconds`"),
    ],
)
def test_a_wrong_table_is_refused_with_row_and_column(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"table\.csv") as caught:
        read_kernel_table(path)
    assert words in str(caught.value)
