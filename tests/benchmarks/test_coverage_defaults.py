"""A model that does not run with its own defaults is told from one that was fed something else, in its own words."""

from __future__ import annotations

import pytest

from benchmarks.coverage import report
from benchmarks.coverage.defaults import own_failure, with_proof
from benchmarks.coverage.models import Entry, loaded


def entry(name: str, architecture: str) -> Entry:
    return Entry(library="transformers", name=name, architecture=architecture)


def test_what_fails_on_a_cpu_as_on_the_meta_device_says_so_itself() -> None:
    uvdoc = entry("uvdoc", "UVDocModel")
    found = with_proof(uvdoc, *loaded(uvdoc), ValueError("not captured"))
    assert "to have 768 channels, but got 128" in found["fails_itself"]
    assert report.cause({**found, "step": "capture"}) == report.NOT_RUNNING
    assert not report.is_out_of_scope(found)  # it is counted among all, and apart


def test_of_a_model_that_runs_or_lacks_an_argument_nothing_is_proved() -> None:
    runs = entry("prophetnet", "ProphetNetForCausalLM")
    assert own_failure(runs, *loaded(runs)) is None
    lacking = entry("gemma4_unified_assistant", "Gemma4UnifiedAssistantForCausalLM")
    with pytest.raises(ValueError, match="not captured"):
        with_proof(lacking, *loaded(lacking), ValueError("not captured"))
