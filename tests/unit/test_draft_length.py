"""How long drafts are, on a made machine whose passes cost what the test says."""

import logging

import pytest

from megatron_opsft.rollout.draft_length import MAX_DRAFT, DraftLength
from megatron_opsft.rollout.pass_costs import PassShape

ROWS, PLAIN = 8, 0.8  # seconds of a pass without drafts
ALL = PassShape(ROWS, ROWS, 0)


def decode(length: DraftLength, each: float, right: int, passes: int = 60) -> list[int]:
    """Most draft tokens of a row in each pass; each: seconds of one; right: how many of a draft's
    first tokens are.
    """
    longest = []
    for _ in range(passes):
        lengths = [0] * ROWS
        if not length.rest(ROWS):
            lengths = length.choose(ALL, [8] * ROWS, [MAX_DRAFT] * ROWS)
        accepted = [min(n, right) for n in lengths]
        for n, a in zip(lengths, accepted, strict=True):
            if n:
                length.note_draft(8, n, a)
        drafted = sum(lengths)
        if drafted:
            length.note(ALL, drafted, PLAIN + each * drafted, ROWS + sum(accepted))
        else:
            length.note_plain(ALL, PLAIN)
        longest.append(max(lengths))
    return longest


def test_right_and_cheap_drafts_become_as_long_as_they_come() -> None:
    length = DraftLength()
    length.open_batch()
    longest = decode(length, each=0.02, right=MAX_DRAFT)
    assert longest[0] == 0 and max(longest) == MAX_DRAFT
    assert sum(n == MAX_DRAFT for n in longest) > 50
    assert 0 in longest[10:]  # what a pass without drafts costs is measured again


def test_drafts_that_are_right_for_a_while_are_cut_there() -> None:
    length = DraftLength()
    length.open_batch()
    longest = decode(length, each=0.04, right=3, passes=200)
    assert 1 <= max(longest[100:]) <= 6


@pytest.mark.parametrize(("each", "right"), [(0.12, MAX_DRAFT), (0.02, 0)])
def test_drafts_that_cost_as_much_as_tokens_or_are_wrong_pause(
    each: float, right: int, caplog: pytest.LogCaptureFixture
) -> None:
    length = DraftLength()
    length.open_batch()
    with caplog.at_level(logging.INFO):
        longest = decode(length, each, right, passes=200)
    assert sum(n > 0 for n in longest) < 30
    assert sum(n > 0 for n in longest[50:]) < 12
    assert caplog.text.count("does not pay with 8 responses a batch") == 1


def test_one_slow_pass_turns_no_drafts_off_for_long() -> None:
    """As the first one of all, which reads all earlier texts."""
    length = DraftLength()
    length.open_batch()
    for _ in range(3):
        length.note_plain(ALL, PLAIN)
    lengths = length.choose(ALL, [8] * ROWS, [MAX_DRAFT] * ROWS)
    length.note(ALL, sum(lengths), 6 * PLAIN, ROWS + sum(lengths))
    longest = decode(length, each=0.02, right=MAX_DRAFT, passes=200)
    assert sum(n == MAX_DRAFT for n in longest) > 120


def test_saved_seconds_are_those_against_one_token_a_pass() -> None:
    length = DraftLength()
    length.open_batch()
    decode(length, each=0.02, right=MAX_DRAFT, passes=2)  # one without drafts, one with 15 each
    tokens = length.counts.tokens // ROWS
    spent = 2 * PLAIN + 0.02 * length.counts.drafted
    length.close_batch([tokens] * ROWS)
    assert length.counts.saved_seconds == pytest.approx(tokens * PLAIN - spent)


def test_saved_seconds_know_that_a_batch_lasts_as_long_as_its_longest_response() -> None:
    length = DraftLength()
    length.open_batch()
    for _ in range(4):
        length.note_plain(PassShape(2, 2, 0), 0.4)
    for _ in range(6):
        length.note_plain(PassShape(1, 1, 0), 0.3)
    length.close_batch([4, 10])
    assert length.counts.saved_seconds == pytest.approx(0.0)


def test_a_pass_that_rows_have_left_counts_by_the_next_number_that_was_timed() -> None:
    """Seven rows are another power of two than eight, of which alone a pass was timed."""
    length = DraftLength()
    length.open_batch()
    decode(length, each=0.02, right=MAX_DRAFT, passes=10)
    seconds = PLAIN + 0.02 * 7 * MAX_DRAFT
    saved = length.note(PassShape(7, 7, 0), 7 * MAX_DRAFT, seconds, 7 * (MAX_DRAFT + 1))
    assert saved == pytest.approx((MAX_DRAFT + 1) * PLAIN - seconds)


def test_rows_that_have_ended_are_of_the_pass_and_its_pauses() -> None:
    """Eight rows are another power of two than the seven that go on."""
    length = DraftLength()
    length.open_batch()
    shape = PassShape(ROWS, 7, 0)
    length.note_plain(shape, PLAIN)
    looks = 0
    for _ in range(60):
        if not length.rest(ROWS):
            looks += 1
            assert not any(length.choose(shape, [0] * 7, [0] * 7))
        length.note_plain(shape, PLAIN)
    assert 6 < looks < 24
