"""What is made of counts of drafts, and of vLLM's counters."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opsft.rollout.draft_counts import DraftCounts, say_if_stopped, sum_counts
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
    meter = DraftMeter(lambda: now, lambda: pytest.fail("by so little nothing is judged"))
    now += [metric("spec_decode_num_drafts", 4), metric("spec_decode_num_draft_tokens", 12)]
    now += [metric("spec_decode_num_accepted_tokens", 3)]
    counts = meter.take()
    assert (counts.rows, counts.tokens, counts.drafted, counts.accepted) == (4, 7, 12, 3)
    assert meter.take() == DraftCounts(has_estimate=False)


@pytest.mark.parametrize(
    ("accepted", "stops"),
    [([20, 8, 1, 0], [0, 0, 1, 0]), ([0, 8, 22, 0], [0, 0, 0, 0])],
)
def test_drafts_end_once_where_they_do_not_pay(accepted: list[int], stops: list[int]) -> None:
    """A tenth of the rows is the border, and 256 rows of 100 a step are there to judge by."""
    now: list[Any] = []
    stopped: list[bool] = []
    meter = DraftMeter(lambda: now, lambda: stopped.append(True))
    found = []
    for number in accepted:
        if not stopped:
            now += [
                metric("spec_decode_num_drafts", 100),
                metric("spec_decode_num_draft_tokens", 300),
                metric("spec_decode_num_accepted_tokens", number),
            ]
        found.append(meter.take().stopped)
    assert found == stops
    assert len(stopped) == sum(stops)


def test_the_end_of_drafts_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="megatron_opsft")
    say_if_stopped(DraftCounts(rows=100, tokens=109, drafted=300, accepted=9))
    assert not caplog.records
    ended = DraftCounts(rows=100, tokens=109, drafted=300, accepted=9, stopped=1)
    say_if_stopped(sum_counts([ended, DraftCounts()]))
    (record,) = caplog.records
    assert "1.09 tokens a pass (3% of its tokens" in record.getMessage()
    assert "off from here on in 1 engine(s)" in record.getMessage()
