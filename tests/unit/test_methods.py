"""Rewards, advantages and aggregations of the methods, against values worked out by hand."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from groups import by_thinking, group, update, weigh
from responses import facts

from megatron_opsft.config.load import load_config
from megatron_opsft.methods.advantages import group_normalized, whiten
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.catalog.by_accuracy import ADlp, ShortRl
from megatron_opsft.methods.catalog.fixed_data import (
    Crst,
    OffPolicySft,
    StepEntropy,
    Stop,
    TokenSkip,
)
from megatron_opsft.methods.catalog.grpo import DrGrpo, Gfpo, Grpo
from megatron_opsft.methods.catalog.l1 import L1Exact, L1Max
from megatron_opsft.methods.catalog.laser import Laser, LaserD, LaserDe
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.catalog.relative_length import (
    Ddca,
    ErRl,
    Gr3,
    Hmpo,
    Kimi,
    Linear,
    MasteryGated,
    SmartThinker,
)
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.methods.catalog.thinkprune import ThinkPrune
from megatron_opsft.methods.catalog.whitened import Dler, Gdpo
from megatron_opsft.methods.facts import LengthTarget, ReferenceStatistics
from megatron_opsft.methods.objective import Aggregation, aggregate
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.records import Outcome, Problem

LIMIT = 3500
PRESETS = Path(__file__).parents[2] / "examples/configs/methods"
# What a group is like otherwise than `groups.group()`, where lengths and verdicts do not say it.
GROUPS: dict[str, dict[str, Any]] = {
    "": {},
    "3.5k": {"limit": LIMIT},
    "4k": {"limit": 4000},
    "5.6k": {"limit": 5600},
    "half right": {"correct": (1, 0, 0, 1)},
    "unfinished": {"lengths": (800, 1600, 2400, 3500), "finished": (1, 1, 1, 0), "limit": LIMIT},
    "exactly 2000": {"target": LengthTarget(num_tokens=2000)},
    "at most 2000": {"target": LengthTarget(num_tokens=2000, kind="max")},
    "reference": {"reference": ReferenceStatistics(mean_tokens=2200, accuracy=0.75)},
}
# Method, group, settings, rewards, advantages, to the four digits that are known. Of GDPO (0, 1)
# against (0, 0) and (1, 1) against (0, 0), of the two rewards; GRPO's last row is as with DAPO's
# rewards of 1 and -1, which are twice as far apart.
GOLDEN = """
thinkprune | 3.5k | | 1 1 0 0 | 0.8660 0.8660 -0.8660 -0.8660
grpo | 3.5k | reward=truncation advantage=group_centered | 1 1 0 0 | 0.5 0.5 -0.5 -0.5
on_policy_sft | 3.5k | | 1 1 0 0 | 1 1 0 0
er_rl | | alpha=0.1 | 0.9727 0.9597 0 0.9202 | 0.3461 0.3287 -0.9509 0.2761
er_rl | 5:1 9:0 | | 0.95 0 | 0.95 -0.95
er_rl | 5:0 9:0 | | 0 0 | 0 0
laser | | target=2048 | 1.5 1.5 -0.5 1.0 | 0.6603 0.6603 -1.4527 0.1321
laser_de | | | 1.5 1.5 0 1.0 | 0.7071 0.7071 -1.4142 0
kimi | | weight=1.0 | 1.5 1.25 0 0.5 | 0.6875 0.4375 -0.8125 -0.3125
kimi | 10:1 20:0 | weight=2.0 | 2 -1 | 1.5 -1.5
kimi | 7:1 7:0 | | 1 0 | 0.5 -0.5
kimi | | warmup_steps=2 | 1 1 0 1 | 0.25 0.25 -0.75 0.25
ddca | | | 1 1 0 1 | 0.5328 0.5132 -1.5 0.4540
gdpo | 10:0 99:0 | target=50 whiten=none std_epsilon=0.0 | 1 0 | 0.7071 -0.7071
gdpo | 10:1 99:0 | target=50 whiten=none std_epsilon=0.0 | 2 0 | 1.4142 -1.4142
short_rl | | length_tolerance=700 | 1.5 1.25 0 0.5 | 0.9986 0.6355 -1.1802 -0.4539
short_rl | | length_tolerance=800 | 1.5 1.5 0 0.5 | 0.8333 0.8333 -1.1667 -0.5
smart_thinker | 100:0 220:1 240:1 900:0 | | 0 1 0.3333 0 | -0.7071 1.4142 0 -0.7071
smart_thinker | 5:1 9:1 | | 1 1 | 0 0
linear | | | 0.9625 0.925 -0.1125 0.8125 | 0.3156 0.2781 -0.7594 0.1656
linear | | only_correct=true | 0.9625 0.9250 0 0.8125 | 0.2875 0.2500 -0.6750 0.1375
linear | half right | only_correct=true | 0.975 0 0 0.875 | 0.5125 -0.4625 -0.4625 0.4125
l1_exact | exactly 2000 | | 0.64 0.88 -0.12 0.40 | 0.4444 1.0057 -1.3332 -0.1169
l1_max | at most 2000 | | 0.86 0.62 0 0 | 1.1179 0.5703 -0.8441 -0.8441
l1_max | at most 2000 | alpha=0.01 | 1 1 0 0 | 0.8660 0.8660 -0.8660 -0.8660
o1_pruner | reference | | 2.25 0.875 -1.5833 0.05 | 2.25 0.875 -1.5833 0.05
mastery_gated | | | 1 1 0 1 | 0.5 0.5 -1.5 0.5
mastery_gated | 800:1 1600:1 2400:1 4000:1 | | 1 1 0.8 0 | 0.6301 0.6301 0.2100 -1.4703
dler | 3.5k | whiten=responses | 1 1 0 0 | 0.8660 0.8660 -0.8660 -0.8660
dler | unfinished | whiten=tokens | 1 1 0 0 | 1.5678 1.5678 -0.6378 -0.6378
dler | | easy_limit=1000 whiten=responses | 1 0 0 0 | 1.5 -0.5 -0.5 -0.5
dler | 800:1 1600:0 2400:0 4000:0 | easy_limit=500 whiten=responses | 1 0 0 0 | 1.5 -0.5 -0.5 -0.5
dler | 800:1 801:1 1600:0 9:0 | easy_limit=800 whiten=responses | 1 0 0 0 | 1.5 -0.5 -0.5 -0.5
gr3 | | | 0.8929 0.8065 0 0.6250 | 0.7734 0.5590 -1.4414 0.1090
gr3 | 800:1 1600:1 2400:1 4000:1 | | 0.8929 0.8065 0.7353 0.6250 | 1.1288 0.3666 -0.2612 -1.2342
gfpo | | kept=3 | 1 1 0 1 | 0.7071 0.7071 -1.4142 0
gfpo | | kept=2 | 1 1 0 1 | 0 0 0 0
gfpo | | kept=3 keep_by=reward_per_token | 1 1 0 1 | 0 0 0 0
hmpo | 4k | | 1 1 0 0 | 0.8660 0.8660 -0.8660 -0.8660
hmpo | 5.6k | | 1 1 0 0.3455 | 0.8306 0.8306 -1.1774 -0.4837
hmpo | 800:1 1600:1 2400:1 4000:1 | | 1 1 0.9981 0.9531 | 0.5270 0.5270 0.4447 -1.4988
hmpo | 5:0 9:0 | | 0 0 | 0 0
grpo | 4k | overlong_buffer=2000 | 1 1 -0.2 0 | 0.8590 0.8590 -1.0151 -0.7028
grpo | 4k | overlong_buffer=2000 overlong_penalty=0.5 | 1 1 -0.1 0.5 | 0.7651 0.7651 -1.3389 -0.1913
"""
STATES: dict[str, dict[str, Any]] = {
    "laser_de": {"targets": {"easy": 2048, "medium": None, "hard": None}},
}


@pytest.mark.parametrize("line", GOLDEN.split("\n")[1:-1])
def test_golden_rewards_and_advantages(line: str) -> None:
    """One problem; and the same lengths as those of thinking, where a method has a length."""
    name, given, keys, rewards, advantages = (part.strip() for part in line.split("|"))
    settings = {key: yaml.safe_load(v) for key, v in (word.split("=") for word in keys.split())}
    pairs = [tuple(map(int, word.split(":"))) for word in given.split() if ":" in word]
    responses = group(*zip(*pairs, strict=True)) if pairs else group(**GROUPS[given])
    given_and_settings = [(responses, settings)]
    if METHODS[name](**settings).has_length:
        of_thinking = settings | {"length_of": "thinking"}
        given_and_settings.append((by_thinking(responses), of_thinking))
    for one, keys_of_one in given_and_settings:
        found = weigh(name, one, state=STATES.get(name), **keys_of_one)
        assert found.rewards == pytest.approx([float(r) for r in rewards.split()], abs=5.1e-5)
        assert found.advantages == pytest.approx([float(a) for a in advantages.split()], abs=5.1e-5)


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


def test_whitening_of_small_differences_adds_its_floor_to_the_unbiased_variance() -> None:
    """Of 0 and 2e-4 that is 2e-8 + 1e-8."""
    (found,) = whiten([[0.0, 2e-4]], [[1, 1]], "responses")
    assert found == pytest.approx([-1e-4 / 3e-8**0.5, 1e-4 / 3e-8**0.5])


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
    assert update("on_policy_sft", group(limit=LIMIT)).factor == 1 / (4 * 1600) == 1.5625e-4
    lengths = [(7, 31, 8, 30), (3, 40, 5, 9)]
    found = update("on_policy_sft", *(group(n, correct, limit=30) for n in lengths))
    kept = [n for g in lengths for n, c in zip(g, correct, strict=True) if c and n <= 30]
    assert [response.num_tokens for response in found.responses] == kept
    assert found.token_weights == found.advantages == (1.0,) * len(kept)
    assert found.factor == (1.0 / (8 * max(kept)) if kept else 0.0)


def test_with_a_divergence_every_response_is_trained_on() -> None:
    same = group((5, 6), (1, 1))
    for beta, trained, factor in ((0.0, False, 0.0), (0.1, True, 1 / 11)):
        assert weigh("grpo", same, beta=beta).trained == (trained, trained)
        assert update("grpo", same, beta=beta).factor == factor


def test_responses_become_groups_in_the_order_of_the_step() -> None:
    rows = [(0, 5, Outcome.CORRECT), (0, 9, Outcome.WRONG), (1, 7, Outcome.WRONG)]
    reference = ReferenceStatistics(mean_tokens=8, accuracy=1)
    run = MethodRun(METHODS["l1_exact"](), seed=7, references={"b": reference})
    problems = [Problem(id=name, text="", answer="") for name in "ba"]
    responses = [facts(problem_index=i, num_tokens=n, outcome=found) for i, n, found in rows]
    groups = run.groups(responses, problems, 8)
    assert [(g.problem_id, g.lengths, g.num_correct, g.limit, g.reference) for g in groups] == [
        ("b", [5, 9], 1, 8, reference),
        ("a", [7], 0, 8, None),
    ]
    assert [g.target for g in groups] == [run.settings.target_length(name, 7) for name in "ba"]


# ThinkPrune has stages, O1-Pruner two forms, self-distillation a teacher.
LONGER = {"thinkprune", "o1_pruner", "self_distillation"}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - LONGER))
def test_a_method_is_a_class_of_at_most_thirty_lines_of_code(name: str) -> None:
    """Without blank lines and docstrings."""
    code = re.sub(r'"""[^"]*"""', "", inspect.getsource(METHODS[name]))
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("name", sorted({p.stem.rsplit("_", 1)[0] for p in PRESETS.glob("*.yaml")}))
def test_presets_are_complete_runs_and_the_papers_share_their_settings(name: str) -> None:
    authors, paper = (PRESETS / f"{name}_{kind}.yaml" for kind in ("authors", "paper"))
    assert load_config(authors).method.name == name
    config = load_config(paper)
    assert config.method.name == name
    assert config.method.num_updates == 1
    assert config.run.dir == Path(f"runs/methods/{name}_paper")
    if name not in ("crst", "tokenskip", "step_entropy", "stop"):  # their data are not the policy's
        rollout = config.rollout
        assert (config.data.prompts_per_step, rollout.group_size) == (64, 8)
        assert (rollout.temperature, rollout.top_p, rollout.max_response_tokens) == (1, 0.95, 3500)


def test_the_catalogue_has_every_method_by_the_name_that_configurations_give() -> None:
    expected = {
        "on_policy_sft": OnPolicySft,
        "grpo": Grpo,
        "dr_grpo": DrGrpo,
        "thinkprune": ThinkPrune,
        "o1_pruner": O1Pruner,
        "l1_exact": L1Exact,
        "l1_max": L1Max,
        "er_rl": ErRl,
        "laser": Laser,
        "laser_d": LaserD,
        "laser_de": LaserDe,
        "kimi": Kimi,
        "mastery_gated": MasteryGated,
        "dler": Dler,
        "gdpo": Gdpo,
        "ddca": Ddca,
        "short_rl": ShortRl,
        "a_dlp": ADlp,
        "smart_thinker": SmartThinker,
        "linear": Linear,
        "gr3": Gr3,
        "gfpo": Gfpo,
        "hmpo": Hmpo,
        "self_distillation": SelfDistillation,
        "crst": Crst,
        "tokenskip": TokenSkip,
        "step_entropy": StepEntropy,
        "stop": Stop,
        "off_policy_sft": OffPolicySft,
    }
    assert expected == METHODS
