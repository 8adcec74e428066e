"""Signs of life: what is said, when, and by whom."""

import logging
import signal
import time
from types import SimpleNamespace

import pytest

from megatron_opsft.runtime import phase
from megatron_opsft.runtime.phase import (
    Count,
    Interrupted,
    StopSignal,
    Stopwatch,
    announce,
    count_done,
    current_phase,
    describe_progress,
    enter_phase,
    expect,
    heard_signals,
    heartbeat,
    interruptible,
    let_signals_end,
)
from megatron_opsft.runtime.progress import Progress


def test_progress_counts_what_is_expected_and_a_new_phase_forgets_it() -> None:
    enter_phase("rollout", 3)
    expect(512)
    count_done(100)
    count_done(28)
    assert describe_progress(60) == "step 3, rollout: 60 s, 128 of 512 responses on this rank"
    enter_phase("train")
    assert describe_progress(1.2) == "step 3, train: 1 s"


def test_tokens_give_a_rate_and_an_estimate_before_the_first_response_ends() -> None:
    count = Count(total=200, max_tokens=200 * 100, began=10.0, tokens=3000)
    assert count.describe(40.0).endswith(", 100 tokens/s, at most 170 s left")
    count.done = 50
    assert count.describe(40.0).endswith(", 100 tokens/s, about 90 s left")


def test_seconds_of_a_phase_inside_another_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 13.0, 20.0, 25.0, 45.0, 50.0])
    monkeypatch.setattr(phase.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(SimpleNamespace(synchronize=lambda: None))  # type: ignore[arg-type]
    with watch.phase("sync"):  # from 1 to 20
        with watch.phase("offload"):  # from 3 to 13
            assert current_phase().name == "offload"
        assert current_phase().name == "sync"
    with watch.phase("offload"):  # from 25 to 45
        pass
    assert watch.seconds == {"offload": 30, "sync": 9}
    assert watch.total() == 50


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
    first, *said = [message.split(":")[0] for message in caplog.messages]
    assert first == "b" and 1 <= len(said) <= 3 and {*said} == {"step 1, long"}


def test_long_work_says_how_much_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("hidden", 4, unit="B", read=lambda: (4, ""), shown=False) as hidden:
        hidden.look()
    read = iter([(30, "right"), (40, "wrong")])
    with Progress("model", 40, unit=" samples", done=10, read=lambda: next(read)) as asked:
        asked.look()  # too early to say it again
        asked.mininterval = 0
        asked.look()
        asked.mininterval = 100  # the end is said however early
    said = capsys.readouterr().err
    assert "hidden" not in said
    assert all(text in said for text in ("10/40", "30/40", "samples/s, right]", "40/40", "wrong]"))


def test_when_nothing_is_left_to_save_a_signal_ends_the_process_again() -> None:
    before = {number: signal.getsignal(number) for number in heard_signals()}
    try:
        stop = StopSignal(0)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signalled  # and the process lives
        let_signals_end()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        others = {*heard_signals()} - {signal.SIGINT}
        assert {signal.getsignal(number) for number in others} == {signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
