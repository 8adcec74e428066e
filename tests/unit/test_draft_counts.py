"""What is made of counts of drafts, and of vLLM's counters."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opsft.rollout.draft_counts import DraftCounts, say_if_useless, sum_counts
from megatron_opsft.rollout.vllm.draft_meter import DraftMeter


def test_seconds_are_a_metric_where_every_engine_can_say_them() -> None:
    known = DraftCounts(rows=4, tokens=6, drafted=8, accepted=2, saved_seconds=1.5)
    assert sum_counts([known, DraftCounts()]).figures() == {
        "draft_length": 2.0,
        "draft_acceptance": 0.25,
        "draft_pass_tokens": 1.5,
        "draft_saved_seconds": 1.5,
    }
    unknown = DraftCounts(rows=2, tokens=3, drafted=4, accepted=1, has_estimate=False)
    assert sum_counts([unknown, DraftCounts()]).figures() == {
        "draft_length": 2.0,
        "draft_acceptance": 0.25,
        "draft_pass_tokens": 1.5,
    }


def metric(name: str, value: int) -> Any:
    return SimpleNamespace(name=f"vllm:{name}", value=value)


def test_a_meter_begins_with_what_others_have_counted() -> None:
    """vLLM's counters are the process's, one for each engine in it."""
    now = [
        metric("spec_decode_num_drafts", 10),
        metric("spec_decode_num_draft_tokens", 30),
        metric("spec_decode_num_accepted_tokens", 5),
        metric("num_requests_running", 7),
    ]
    meter = DraftMeter(lambda: now)
    now += [metric("spec_decode_num_drafts", 4), metric("spec_decode_num_draft_tokens", 12)]
    now += [metric("spec_decode_num_accepted_tokens", 3)]
    counts = meter.take()
    assert (counts.rows, counts.tokens, counts.drafted, counts.accepted) == (4, 7, 12, 3)
    assert meter.take() == DraftCounts(has_estimate=False)


@pytest.mark.parametrize(("tokens", "lines"), [(109, 1), (111, 0)])
def test_drafts_that_cannot_pay_are_said(
    tokens: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="megatron_opsft")
    say_if_useless(DraftCounts(rows=100, tokens=tokens, drafted=300, accepted=tokens - 100))
    say_if_useless(DraftCounts())
    assert len(caplog.records) == lines
    assert all("1.09 tokens a pass (3% of its tokens" in r.getMessage() for r in caplog.records)
