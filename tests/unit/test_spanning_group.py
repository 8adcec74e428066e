"""A group beside the job's, over gloo; over NCCL: tests/gpu."""

from spanning_rounds import EXPECTED, rounds_of


def test_messages_of_two_members_arrive_in_order_also_in_a_second_group() -> None:
    assert rounds_of(("cpu", "cpu")) == EXPECTED
