"""Rewards, advantages and aggregations of the methods, against values worked out by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_opsft.config_file import load_config
from megatron_opsft.methods.advantages import group_normalized, identity, whiten, z_score
from megatron_opsft.methods.aggregation import Aggregation, aggregate
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.catalog.grpo import TO_ON_POLICY_SFT
from megatron_opsft.methods.facts import Group, Response
from megatron_opsft.methods.method import Weights
from megatron_opsft.methods.normalization import MODES, normalize
from megatron_opsft.records import Outcome

LENGTHS, CORRECT = (800, 1600, 2400, 4000), (1, 1, 0, 1)
LIMIT = 3500


def group(
    lengths: Sequence[int] = LENGTHS, correct: Sequence[int] = CORRECT, **facts: Any
) -> Group:
    responses = [
        Response(num_tokens=n, correct=bool(c)) for n, c in zip(lengths, correct, strict=True)
    ]
    return Group(**{"responses": responses, "limit": 16384, **facts})


def weigh(name: str, *batch: Group, state: dict[str, Any] | None = None, **keys: Any) -> Weights:
    method = METHODS[name]
    settings = method.settings(**keys)
    return method.weigh(batch, settings, method.state(**(state or {})))


GOLDEN = [
    (
        "grpo",
        {"reward": "truncation"},
        {"limit": LIMIT},
        [1, 1, 0, 0],
        [0.8660] * 2 + [-0.8660] * 2,
    ),
    (
        "grpo",
        {"reward": "truncation", "advantage": "group_centered"},
        {"limit": LIMIT},
        [1, 1, 0, 0],
        [0.5, 0.5, -0.5, -0.5],
    ),
    ("on_policy_sft", {}, {"limit": LIMIT}, [1, 1, 0, 0], [1, 1, 0, 0]),
]


@pytest.mark.parametrize(("name", "keys", "facts", "rewards", "advantages"), GOLDEN)
def test_golden_rewards_and_advantages(
    name: str,
    keys: dict[str, Any],
    facts: dict[str, Any],
    rewards: list[float],
    advantages: list[float],
) -> None:
    """One problem, four responses; to the four digits that are known."""
    weights = weigh(name, group(**facts), **keys)
    assert weights.rewards == pytest.approx(rewards, abs=5.1e-5)
    assert weights.advantages == pytest.approx(advantages, abs=5.1e-5)


def test_golden_weight_of_on_policy_sft() -> None:
    weights = weigh("on_policy_sft", group(limit=LIMIT))
    assert weights.trained == (True, True, False, False)
    assert weights.token_weights == (1.0,) * 4
    assert weights.factor == 1 / (4 * 1600) == 1.5625e-4


def test_two_reward_vectors_with_one_sum_cannot_be_told_apart() -> None:
    """The paper's example: (0, 1) and (0, 0) sum to 1 and 0; (1, 1) and (0, 0) to 2 and 0."""
    for rewards in ([1.0, 0.0], [2.0, 0.0]):
        assert group_normalized(rewards, 0.0) == pytest.approx([0.7071, -0.7071], abs=5e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.3, 1e9])
def test_equal_rewards_have_exactly_no_advantage(value: float) -> None:
    """So that such groups cost nothing."""
    for num in (2, 3, 7, 8):
        assert set(group_normalized([value] * num)) == {0.0}
        assert whiten([[value] * num], [[1] * num]) == [[0.0] * num]


def test_standard_deviation_divides_by_the_count_less_one_and_the_z_score_by_the_count() -> None:
    values = [0.25, -1.5, 3.0, 0.5, 7.75]
    mean = sum(values) / 5
    squares = sum((v - mean) ** 2 for v in values)
    by_hand = [(v - mean) / (math.sqrt(squares / 4) + 1e-6) for v in values]
    assert group_normalized(values) == pytest.approx(by_hand, rel=1e-12)
    (first, second) = z_score([values[:2], values[2:]])
    by_hand = [(v - mean) / math.sqrt(squares / 5) for v in values]
    assert first + second == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "weights", "factor"),
    [
        ("max_accepted", [1, 1, 1], 1 / (3 * 40)),
        ("accepted_tokens", [1, 1, 1], 1 / 50),
        ("all_tokens", [1, 1, 1], 1 / 70),
        ("sequence", [1 / 10, 1 / 20, 1 / 40], 1 / 3),
        ("sequence_sum", [1, 1, 1], 1 / 3),
        ("constant", [1, 1, 1], 1 / (3 * 64)),
    ],
)
def test_aggregation_by_hand(name: Aggregation, weights: list[float], factor: float) -> None:
    found = aggregate(name, [10, 20, 40], [True, False, True], 64)
    assert found == (tuple(weights), factor)


@pytest.mark.parametrize("aggregation", MODES)
@pytest.mark.parametrize("correct", [(1, 1, 0, 1), (0, 0, 0, 0), (0, 1, 0, 0)])
def test_on_policy_sft_has_the_numbers_of_its_normalization(
    aggregation: str, correct: tuple[int, ...]
) -> None:
    """Bit for bit what selection and normalization make of the accepted responses."""
    lengths = [(7, 31, 8, 30), (3, 40, 5, 9)]
    weights = weigh(
        "on_policy_sft", *(group(n, correct, limit=30) for n in lengths), aggregation=aggregation
    )
    kept = [n for g in lengths for n, c in zip(g, correct, strict=True) if c and n <= 30]
    expected = normalize(kept, 8, MODES[aggregation])
    trained = [i for i, is_trained in enumerate(weights.trained) if is_trained]
    assert tuple(weights.token_weights[i] for i in trained) == expected.token_weights
    assert {weights.advantages[i] for i in trained} <= {1.0}
    assert weights.factor == expected.factor


def test_grpo_becomes_on_policy_sft_in_five_steps() -> None:
    """Each changes something; the last has on-policy SFT's numbers, bit for bit."""
    batch = [group(limit=LIMIT), group((90, 3600, 44, 17), (1, 1, 1, 0), limit=LIMIT)]
    seen: list[tuple[Weights, bool]] = []
    overrides = ["model.path=m", "data.train=d", "method.name=grpo"]
    for change in ("method.aggregation=sequence", *TO_ON_POLICY_SFT):
        overrides.append(change)
        settings = load_config(None, overrides).method
        weights = METHODS["grpo"].weigh(batch, settings, METHODS["grpo"].state())
        seen.append((weights, settings.needs_reference))
    assert all(before != after for before, after in zip(seen, seen[1:], strict=False))
    assert seen[-1][0] == weigh("on_policy_sft", *batch)


def test_with_a_divergence_every_response_is_trained_on() -> None:
    same = group((5, 6), (1, 1))
    assert weigh("grpo", same, beta=0.0).trained == (False, False)
    assert weigh("grpo", same, beta=0.0).factor == 0.0
    assert weigh("grpo", same, beta=0.1).trained == (True, True)
    assert weigh("grpo", same, beta=0.1).factor == 1 / 11


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_is_known_of_a_response(outcome: Outcome) -> None:
    response = Response.judged(outcome, 7, finished=outcome is not Outcome.UNFINISHED)
    assert response.correct == (outcome is Outcome.CORRECT)
    assert response.has_answer == (outcome.value in ("correct", "wrong", "timeout", "error"))
    assert identity([1.5]) == [1.5]


def test_the_page_has_the_same_way_from_grpo() -> None:
    page = (Path(__file__).parents[2] / "docs/methods.md").read_text(encoding="utf-8")
    assert "\n".join(["```", "method.name=grpo", *TO_ON_POLICY_SFT, "```"]) in page
    assert all(f"| `{name}` |" in page for name in get_args(Aggregation))
