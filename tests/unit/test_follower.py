"""What text a response with drafts follows."""

from megatron_opsft.rollout.follower import NO_DRAFT, Follower
from megatron_opsft.rollout.suffix_index import AFTER_WRONG, SuffixIndex

EARLIER = list(range(100, 140))


def follower(*earlier: list[int], start: list[int]) -> Follower:
    text = list(start)
    return Follower(text, SuffixIndex(list(earlier), [text]))


def say(one: Follower, tokens: list[int]) -> None:
    for token in tokens:
        one.put(token)
        one.index.catch_up()
        one.draft(4)


def test_a_replaced_token_does_not_end_what_is_followed() -> None:
    one = follower(EARLIER, start=EARLIER[:8])
    assert one.draft(4) == (8, EARLIER[8:12])
    say(one, [*EARLIER[8:12], 7])  # in the place of the thirteenth
    assert one.draft(4) == (AFTER_WRONG, EARLIER[13:17])
    say(one, EARLIER[13:14])
    assert one.draft(4) == (8, EARLIER[14:18])  # the agreement of before still counts


def test_a_text_that_was_followed_for_long_is_not_left_for_two_tokens_that_stand_elsewhere() -> (
    None
):
    other = [*EARLIER[20:22], 1, 2, 3, 4]
    one = follower(EARLIER, other, start=EARLIER[:8])
    one.draft(4)
    say(one, EARLIER[8:22])
    assert one.draft(4)[1] == EARLIER[22:26]  # `other` has the same two, and is the later one
    short = follower(EARLIER, other, start=EARLIER[20:22])
    assert short.draft(4) == (2, other[2:6])


def test_a_text_is_left_where_more_agrees_elsewhere_and_after_many_differences() -> None:
    other = [1, 2, 3, 4, *range(50, 60)]
    one = follower(EARLIER, other, start=EARLIER[:8])
    one.draft(4)
    say(one, [1, 2, 3])  # not what was followed any more
    say(one, [4, 50, 51])
    assert one.draft(4)[1] == [52, 53, 54, 55]
    lost = follower(EARLIER, start=EARLIER[:8])
    lost.draft(4)
    say(lost, [7, 6, 5, 4, 3])
    assert lost.draft(4) == NO_DRAFT


def test_the_end_of_a_text_is_no_draft_and_a_repetition_goes_on() -> None:
    one = follower(EARLIER, start=EARLIER[-8:])
    assert one.draft(4) == NO_DRAFT
    again = follower(start=[5, 6, 7, 8, 5, 6])
    again.index.catch_up()
    assert again.draft(6) == (2, [7, 8, 5, 6, 7, 8])
