"""Rewards, advantages and aggregations of the methods, against values worked out by hand."""

import ast
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from groups import TO_ON_POLICY_SFT, group, update, weigh
from responses import facts

from megatron_opsft.config.load import load_config
from megatron_opsft.methods.advantages import group_normalized, whiten, z_score
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.facts import LengthTarget, ReferenceStatistics
from megatron_opsft.methods.objective import Aggregation, aggregate
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.records import Outcome, Problem

LIMIT = 3500
PRESETS = Path(__file__).parents[2] / "examples/configs/methods"
ALL = (1, 1, 1, 1)
TWO: dict[str, Any] = {"lengths": (5, 9), "correct": (1, 0)}
LATE: dict[str, Any] = {"lengths": (10, 99), "correct": (1, 0)}
CUT = {"limit": LIMIT}
EXACT = {"target": LengthTarget(num_tokens=2000)}
MOST = {"target": LengthTarget(num_tokens=2000, kind="max")}
REFERENCE = {"reference": ReferenceStatistics(mean_tokens=2200, accuracy=0.75)}
GDPO: dict[str, Any] = {"target": 50, "whiten": "none", "std_epsilon": 0.0}


def golden(
    name: str,
    rewards: list[float],
    advantages: list[float],
    facts: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """facts: of the group, where it is not `groups.group()`."""
    return pytest.param(name, rewards, advantages, facts or {}, settings)


# To the four digits that are known.
GOLDEN = [
    golden("thinkprune", [1, 1, 0, 0], [0.8660, 0.8660, -0.8660, -0.8660], CUT),
    golden(
        "grpo",
        [1, 1, 0, 0],
        [0.5, 0.5, -0.5, -0.5],
        CUT,
        reward="truncation",
        advantage="group_centered",
    ),
    golden("on_policy_sft", [1, 1, 0, 0], [1, 1, 0, 0], CUT),
    golden("er_rl", [0.9727, 0.9597, 0, 0.9202], [0.3461, 0.3287, -0.9509, 0.2761], alpha=0.1),
    golden("laser", [1.5, 1.5, -0.5, 1.0], [0.6603, 0.6603, -1.4527, 0.1321], target=2048),
    golden("laser_de", [1.5, 1.5, 0, 1.0], [0.7071, 0.7071, -1.4142, 0]),
    golden("kimi", [1.5, 1.25, 0, 0.5], [0.6875, 0.4375, -0.8125, -0.3125], weight=1.0),
    golden("kimi", [2, -1], [1.5, -1.5], {**TWO, "lengths": (10, 20)}, weight=2.0),
    golden("kimi", [1, 0], [0.5, -0.5], {**TWO, "lengths": (7, 7)}),
    golden("kimi", [1, 1, 0, 1], [0.25, 0.25, -0.75, 0.25], warmup_steps=2),
    golden("er_rl", [0.95, 0], [0.95, -0.95], TWO),
    golden("er_rl", [0, 0], [0, 0], {**TWO, "correct": (0, 0)}),
    golden("ddca", [1, 1, 0, 1], [0.5328, 0.5132, -1.5, 0.4540]),
    # (0, 1) against (0, 0), and (1, 1) against (0, 0), of the two rewards.
    golden("gdpo", [1, 0], [0.7071, -0.7071], {**LATE, "correct": (0, 0)}, **GDPO),
    golden("gdpo", [2, 0], [1.4142, -1.4142], LATE, **GDPO),
    golden(
        "short_rl", [1.5, 1.25, 0, 0.5], [0.9986, 0.6355, -1.1802, -0.4539], length_tolerance=700
    ),
    golden("short_rl", [1.5, 1.5, 0, 0.5], [0.8333, 0.8333, -1.1667, -0.5], length_tolerance=800),
    golden(
        "smart_thinker",
        [0, 1, 0.3333, 0],
        [-0.7071, 1.4142, 0, -0.7071],
        {"lengths": (100, 220, 240, 900), "correct": (0, 1, 1, 0)},
    ),
    golden("smart_thinker", [1, 1], [0, 0], {**TWO, "correct": (1, 1)}),
    golden("linear", [0.9625, 0.925, -0.1125, 0.8125], [0.3156, 0.2781, -0.7594, 0.1656]),
    golden("l1_exact", [0.64, 0.88, -0.12, 0.40], [0.4444, 1.0057, -1.3332, -0.1169], EXACT),
    golden("l1_max", [0.86, 0.62, 0, 0], [1.1179, 0.5703, -0.8441, -0.8441], MOST),
    golden("l1_max", [1, 1, 0, 0], [0.8660, 0.8660, -0.8660, -0.8660], MOST, alpha=0.01),
    golden("o1_pruner", [2.25, 0.875, -1.5833, 0.05], [2.25, 0.875, -1.5833, 0.05], REFERENCE),
    golden("mastery_gated", [1, 1, 0, 1], [0.5, 0.5, -1.5, 0.5]),
    golden("mastery_gated", [1, 1, 0.8, 0], [0.6301, 0.6301, 0.2100, -1.4703], {"correct": ALL}),
    golden("dler", [1, 1, 0, 0], [0.8660, 0.8660, -0.8660, -0.8660], CUT, whiten="responses"),
    golden(
        "dler",
        [1, 1, 0, 0],
        [1.5678, 1.5678, -0.6378, -0.6378],
        {"lengths": (800, 1600, 2400, 3500), "finished": (1, 1, 1, 0), "limit": LIMIT},
        whiten="tokens",
    ),
    golden("gr3", [0.8929, 0.8065, 0, 0.6250], [0.7734, 0.5590, -1.4414, 0.1090]),
    golden(
        "gr3",
        [0.8929, 0.8065, 0.7353, 0.6250],
        [1.1288, 0.3666, -0.2612, -1.2342],
        {"correct": ALL},
    ),
    golden("gfpo", [1, 1, 0, 1], [0.7071, 0.7071, -1.4142, 0], kept=3),
    golden("gfpo", [1, 1, 0, 1], [0, 0, 0, 0], kept=2),
    golden("gfpo", [1, 1, 0, 1], [0, 0, 0, 0], kept=3, keep_by="reward_per_token"),
    golden(
        "linear", [0.9625, 0.9250, 0, 0.8125], [0.2875, 0.2500, -0.6750, 0.1375], only_correct=True
    ),
    golden(
        "linear",
        [0.975, 0, 0, 0.875],
        [0.5125, -0.4625, -0.4625, 0.4125],
        {"correct": (1, 0, 0, 1)},
        only_correct=True,
    ),
    golden(
        "grpo",
        [1, 1, -0.2, 0],
        [0.8590, 0.8590, -1.0151, -0.7028],
        {"limit": 4000},
        overlong_buffer=2000,
    ),
    # As with DAPO's rewards of 1 and -1, which are twice as far apart.
    golden(
        "grpo",
        [1, 1, -0.1, 0.5],
        [0.7651, 0.7651, -1.3389, -0.1913],
        {"limit": 4000},
        overlong_buffer=2000,
        overlong_penalty=0.5,
    ),
]
STATES: dict[str, dict[str, Any]] = {
    "laser_de": {"targets": {"easy": 2048, "medium": None, "hard": None}},
}


@pytest.mark.parametrize(("name", "rewards", "advantages", "facts", "settings"), GOLDEN)
def test_golden_rewards_and_advantages(
    name: str,
    rewards: list[float],
    advantages: list[float],
    facts: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """One problem."""
    weights = weigh(name, group(**facts), state=STATES.get(name), **settings)
    assert weights.rewards == pytest.approx(rewards, abs=5.1e-5)
    assert weights.advantages == pytest.approx(advantages, abs=5.1e-5)


def test_gfpo_keeps_those_with_most_reward_a_token_of_graded_rewards() -> None:
    settings = METHODS["gfpo"](kept=3, keep_by="reward_per_token")
    (found,) = settings.advantages([group()], [[0.9, 0.6, -1.0, 0.2]])
    assert found == pytest.approx([1.1625, 0.1162, 0, -1.2787], abs=5.1e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.3, 1e9])
def test_equal_rewards_have_exactly_no_advantage(value: float) -> None:
    """So that such groups cost nothing."""
    for num in (2, 3, 7, 8):
        assert set(group_normalized([value] * num)) == {0.0}
        assert whiten([[value] * num], [[1] * num], "responses") == [[0.0] * num]


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


@pytest.mark.parametrize("correct", [(1, 1, 0, 1), (0, 0, 0, 0), (0, 1, 0, 0)])
def test_on_policy_sft_by_hand(correct: tuple[int, ...]) -> None:
    """Algorithm 1: accepted responses with weight 1, 1 / (N M) of all sampled ones."""
    golden = update("on_policy_sft", group(limit=LIMIT))
    assert golden.factor == 1 / (4 * 1600) == 1.5625e-4
    lengths = [(7, 31, 8, 30), (3, 40, 5, 9)]
    found = update("on_policy_sft", *(group(n, correct, limit=30) for n in lengths))
    kept = [n for g in lengths for n, c in zip(g, correct, strict=True) if c and n <= 30]
    assert [response.num_tokens for response in found.responses] == kept
    assert found.token_weights == found.advantages == (1.0,) * len(kept)
    assert found.factor == (1.0 / (8 * max(kept)) if kept else 0.0)


def test_grpo_becomes_on_policy_sft_in_five_steps() -> None:
    """Each changes something; the last has on-policy SFT's numbers, bit for bit."""
    batch = [group(limit=LIMIT), group((90, 3600, 44, 17), (1, 1, 1, 0), limit=LIMIT)]
    seen: list[Any] = []
    overrides = ["model.path=m", "data.train=d", "method.name=grpo"]
    for change in ("method.aggregation=sequence", *TO_ON_POLICY_SFT):
        overrides.append(change)
        settings = load_config(None, overrides).method
        run = MethodRun(settings, seed=0)
        weights = run.weigh(batch)
        seen.append((weights, run.updates(batch, weights), settings.objective(1.0)))
    assert all(before != after for before, after in zip(seen, seen[1:], strict=False))
    assert seen[-1][0] == weigh("on_policy_sft", *batch)


def test_with_a_divergence_every_response_is_trained_on() -> None:
    same = group((5, 6), (1, 1))
    assert weigh("grpo", same, beta=0.0).trained == (False, False)
    assert update("grpo", same, beta=0.0).factor == 0.0
    assert weigh("grpo", same, beta=0.1).trained == (True, True)
    assert update("grpo", same, beta=0.1).factor == 1 / 11


def test_responses_become_groups_in_the_order_of_the_step() -> None:
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    rows = [(0, 0, 5, right), (0, 1, 9, wrong), (1, 0, 7, wrong), (1, 1, 3, right)]
    reference = ReferenceStatistics(mean_tokens=8, accuracy=1)
    run = MethodRun(METHODS["l1_exact"](), seed=7, references={"b": reference})
    problems = [Problem(id=name, text="", answer="") for name in "ba"]
    names = ("problem_index", "sample_index", "num_tokens", "outcome")
    responses = [facts(**dict(zip(names, row, strict=True))) for row in rows]
    groups = run.groups(responses, problems, 8)
    assert [(g.problem_id, g.lengths, g.num_correct, g.limit) for g in groups] == [
        ("b", [5, 9], 1, 8),
        ("a", [7, 3], 1, 8),
    ]
    assert [g.reference for g in groups] == [reference, None]
    assert [g.target for g in groups] == [run.settings.target_length(name, 7) for name in "ba"]
    assert weigh("on_policy_sft", *groups).trained == (True, False, False, True)


# ThinkPrune has stages, O1-Pruner two forms, self-distillation a teacher.
LONGER = {"thinkprune", "o1_pruner", "self_distillation"}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - LONGER))
def test_a_method_is_a_class_of_at_most_thirty_lines_of_code(name: str) -> None:
    """Without blank lines and docstrings."""
    source = inspect.getsource(METHODS[name])
    code = [line for line in source.splitlines() if line.strip()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            code = code[len((ast.get_docstring(node) or "").splitlines()) :]
    assert len(code) <= 30


@pytest.mark.parametrize("name", sorted({p.stem.rsplit("_", 1)[0] for p in PRESETS.glob("*.yaml")}))
def test_presets_are_complete_runs_and_the_papers_share_their_settings(name: str) -> None:
    authors, paper = (PRESETS / f"{name}_{kind}.yaml" for kind in ("authors", "paper"))
    assert load_config(authors).method.name == name
    config = load_config(paper)
    assert config.method.name == name
    assert config.method.num_updates == 1
    assert config.run.dir == Path(f"runs/methods/{name}_paper")
    if name not in ("crst", "tokenskip", "step_entropy"):  # their data are not the policy's
        rollout = config.rollout
        assert (config.data.prompts_per_step, rollout.group_size) == (64, 8)
        assert (rollout.temperature, rollout.top_p, rollout.max_response_tokens) == (1, 0.95, 3500)
