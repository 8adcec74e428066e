"""Signs of life: what is said, when, and by whom."""

import logging
import time

import pytest

from megatron_opsft.runtime.phase import (
    Count,
    Interrupted,
    announce,
    count_done,
    describe_progress,
    enter_phase,
    expect,
    heartbeat,
    interruptible,
)


def test_progress_counts_what_is_expected_and_a_new_phase_forgets_it() -> None:
    enter_phase("rollout", 3)
    assert describe_progress(31.2) == "step 3, rollout: 31 s"
    expect(512)
    count_done(100)
    count_done(28)
    assert describe_progress(60) == "step 3, rollout: 60 s, 128 of 512 responses on this rank"
    enter_phase("train")
    assert describe_progress(1) == "step 3, train: 1 s"


def test_tokens_give_a_rate_and_an_estimate_before_the_first_response_ends() -> None:
    count = Count(total=200, max_tokens=200 * 100, began=10.0, tokens=3000)
    assert count.describe(40.0).endswith(", 100 tokens/s, at most 170 s left")
    count.done = 50
    assert count.describe(40.0).endswith(", 100 tokens/s, about 90 s left")


def test_a_phase_is_left_only_where_that_may_be() -> None:
    asked = False
    with interruptible(lambda: asked):
        count_done(1)
        asked = True
        with pytest.raises(Interrupted):
            count_done(0)
    count_done(1)


def test_rank_0_says_a_long_phase_again_and_again_and_nobody_a_short_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        monkeypatch.setenv("RANK", "1")
        announce("a")
        with heartbeat(every_seconds=0.01):
            time.sleep(0.1)
        monkeypatch.setenv("RANK", "0")
        announce("b")
        with heartbeat(every_seconds=0.2):
            for _ in range(10):
                enter_phase("short", 1)
                time.sleep(0.05)
            enter_phase("long")
            time.sleep(0.75)
    first, *said = [record.getMessage() for record in caplog.records]
    assert first == "b" and 1 <= len(said) <= 3
    assert {line.split(":")[0] for line in said} == {"step 1, long"}
