"""What methods do beyond a reward: stages, targets, monitor problems, refills, prices, objectives;
and what a run is refused that does not fit its method.
"""

import math
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from groups import columns, group, update, weigh
from responses import facts

from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.methods import facts as method_facts
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.catalog.grpo import Grpo
from megatron_opsft.methods.catalog.l1 import L1Exact
from megatron_opsft.methods.catalog.laser import Laser, choose_targets
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.catalog.relative_length import ErRl, Gr3, Kimi
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.methods.catalog.whitened import Dler
from megatron_opsft.methods.facts import Group, LengthTarget, PromptChange, ReferenceStatistics
from megatron_opsft.methods.objective import (
    Distillation,
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
    TokenPenalty,
)
from megatron_opsft.methods.policy import PolicySettings
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.methods.updates import MethodRun

ONLINE = [name for name, method in METHODS.items() if not method().has_fixed_data]
POLICIES = [name for name in ONLINE if issubclass(METHODS[name], PolicySettings)]
EXACT = LengthTarget(num_tokens=2000)
REFERENCE = ReferenceStatistics(mean_tokens=2200, accuracy=0.75)


def run_of(name: str, **keys: Any) -> Any:
    return MethodRun(METHODS[name](**keys), seed=7)


def configured(*keys: str) -> MethodSettings:
    """The method of a configuration with these keys of it, or of a section."""
    keys = tuple(key if "." in key.partition("=")[0] else f"method.{key}" for key in keys)
    return load_config(None, ["model.path=m", "data.train=d", *keys]).method


def test_thinkprune_goes_through_its_stages() -> None:
    run = run_of("thinkprune", limits=[4000, 3000, 2000], stage_steps=[2, 1], announce_limit=True)
    seen = []
    for _ in range(5):
        seen.append((run.limit, run.starts_stage))
        assert f" {seen[-1][0]} tokens" in run.prompt_change("p0").system
        assert run.prompt_change("p0", held_out=True) == PromptChange()
        run.advance([], refills=0)
    assert seen == [(4000, False), (4000, False), (3000, True), (2000, True), (2000, False)]
    plain = run_of("thinkprune")
    assert plain.settings.limit(plain.state) is None
    assert plain.prompt_change("p0") == PromptChange()


def test_l1_targets_are_drawn_once_from_seed_and_problem() -> None:
    method: Any = METHODS["l1_max"](lowest_target=100, highest_target=4000)
    drawn, again, other = (
        [method.target_length(f"p{n}", seed) for n in range(2000)] for seed in (7, 7, 8)
    )
    assert drawn == again != other
    tokens = [target.num_tokens for target in drawn]
    assert 100 <= min(tokens) < 110 and 3990 < max(tokens) <= 4000
    assert fmean(target.kind == "max" for target in drawn) == pytest.approx(0.5, abs=0.034)
    assert run_of("l1_exact").settings.target_length("p0", 7).kind == "exact"


def test_l1_asks_for_a_length_in_evaluations_too() -> None:
    run = run_of("l1_max", exact_share=0.0)
    assert run.prompt_change("p0", held_out=True) == run.prompt_change("p0")
    for name, words in (("l1_exact", "for 3500"), ("l1_max", "for maximum 3500")):
        told = run_of(name, eval_target=3500).prompt_change("p0", held_out=True)
        assert told.suffix == f" Think {words} tokens."
    assert run_of("l1_max", prompt_target=False).prompt_change("p0") == PromptChange()


MONITOR = [  # two easy problems, one medium, one hard, of 8 responses each
    group([100] * 2 + [2000] * 6, [1] * 6 + [0] * 2),
    group([100] * 1 + [3000] * 7, [1] * 8),
    group([1500] * 2 + [2500] * 2 + [9000] * 4, [1] * 3 + [0] * 5),
    group([700] * 1 + [5000] * 7, [1] * 2 + [0] * 6),
]


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        # Coverage asked for: 1/6, 1/3, 1 of 16, 8 and 8 responses.
        ({"rounding": "ceil"}, (1024, 3072, 5120)),
        # 1/5, 1/2, 1: 3 of 16 are less than a fifth.
        ({"rounding": "floor"}, (2048, 3072, 5120)),
        ({"highest_target": 4096}, (1024, 3072, None)),
        ({"highest_target": 3072}, (1024, 3072, None)),  # the highest is one of them
    ],
)
def test_laser_targets_are_the_smallest_that_cover_enough(
    keys: dict[str, Any], targets: tuple[int | None, ...]
) -> None:
    run = run_of("laser_d", **keys)
    run.observe(MONITOR)
    assert tuple(run.state.targets[band] for band in ("easy", "medium", "hard")) == targets


def test_laser_asks_of_few_responses_for_one_correct_one_at_least() -> None:
    """A third of one or of two, rounded down, would be none."""
    of_one = [group((length,), (1,)) for length in (4, 6)]
    found = choose_targets(of_one, (2, 4, 6, 8), "floor")
    assert found == {"easy": 6, "medium": None, "hard": None}
    of_two = [group((length, 50), (1, 0)) for length in (4, 6)]
    assert choose_targets(of_two, (4, 6, 50), "floor")["medium"] == 50
    never_right = [group((length,), (0,)) for length in (4, 6)]
    assert choose_targets(never_right, (4, 6), "ceil")["hard"] == 6


def test_laser_d_looks_at_the_monitor_before_the_first_step_and_every_twenty() -> None:
    run = run_of("laser_d", highest_target=4096)
    states = [run.state.model_copy(update={"step": n}) for n in range(1, 42)]
    sizes = {state.step: run.settings.monitor_size(state) for state in states}
    assert {n: size for n, size in sizes.items() if size} == dict.fromkeys((1, 21, 41), (500, 8))
    run.observe(MONITOR)
    easy = group((900, 1100, 9000), (1, 1, 0))
    assert columns(run.credit([easy])).rewards == (1.5, 1.0, -0.5)
    hard = group((900, 1100, 9000, 16384), (1, 0, 0, 0))  # any length will do
    assert columns(run.credit([hard])).rewards == (1.5, -0.5, -0.5, -0.5)
    explored = weigh("laser_de", easy, state=run.state.model_dump(), highest_target=4096)
    assert explored.rewards == (1.5, 1.0, 0.0)


def test_er_rl_whitening_over_tokens_by_hand() -> None:
    batch = [group(), group((90, 17, 3, 44), (0, 1, 0, 1))]
    plain, lengths = weigh("er_rl", *batch).advantages, [n for g in batch for n in g.lengths]
    mean = fmean(plain, lengths)
    std = math.sqrt(fmean([(a - mean) ** 2 for a in plain], lengths))
    found = weigh("er_rl", *batch, whiten="tokens").advantages
    assert found == pytest.approx([(a - mean) / std for a in plain], rel=1e-6)
    with_divergence = weigh("er_rl", *batch, whiten="tokens", beta=0.001)
    assert with_divergence.advantages == plain  # whitened when the tokens' divergences are known
    assert all(with_divergence.trained)


def test_dler_draws_again_until_the_batch_is_full_or_the_cap_is_reached() -> None:
    dler = run_of("dler", max_refills=2)
    mixed, solved, failed = (group((5, 6), c) for c in ((1, 0), (1, 1), (0, 0)))
    late = group((5, 60), (1, 1), limit=30)  # right, but too long: mixed
    groups = [mixed, solved, failed, late, mixed]
    assert dler.fill(groups, 4, 0) == ([0, 3, 4], True)
    assert dler.fill(groups, 4, 2) == ([0, 3, 4], False)
    assert dler.fill(groups, 2, 0) == ([0, 3], False)  # what is over is left out
    assert run_of("dler", max_refills=0).fill(groups, 5, 0) == ([0, 3, 4], False)


def test_groups_of_equal_rewards_are_replaced_where_a_run_asks_for_it() -> None:
    """By the method's rewards; near the limit they are lower, which makes no group another."""
    mixed, solved, failed = (group((5, 6), c, limit=6) for c in ((1, 0), (1, 1), (0, 0)))
    groups = [mixed, solved, failed]
    for name, kept in (("grpo", [0]), ("dr_grpo", [0]), ("linear", [0, 1]), ("gr3", [0])):
        assert run_of(name).fill(groups, 3, 0) == ([0, 2] if name == "gr3" else [0, 1, 2], False)
        run = run_of(name, max_refills=2, overlong_buffer=3)
        assert [run.fill(groups, 3, refills) for refills in (1, 2)] == [(kept, True), (kept, False)]


def test_gr3_leaves_out_a_group_that_is_all_correct_though_its_rewards_differ() -> None:
    for correct, kept in (((1, 1), False), ((1, 0), True)):
        given = group((5, 6), correct)
        rewards = Gr3().group_rewards(given, run_of("gr3").state)
        assert Gr3().keeps(given, rewards) == kept


@pytest.mark.parametrize(
    ("keys", "learns"),
    [
        ({"beta": 0.0}, True),
        ({"beta": 0.0, "advantage": "group_centered"}, True),
        ({"beta": 0.1, "advantage": "identity"}, True),  # for the divergence alone
        ({"beta": 0.0, "advantage": "identity"}, False),
    ],
)
def test_grpo_learns_from_wrong_responses_unless_rewards_are_advantages(
    keys: dict[str, Any], learns: bool
) -> None:
    assert Grpo(**keys).learns_from_rejected == learns


@pytest.mark.parametrize("name", POLICIES)
def test_overlong_shaping_reaches_the_advantages_of_every_policy_gradient(name: str) -> None:
    given = group(target=EXACT, reference=REFERENCE, limit=4000)
    plain = weigh(name, given, overlong_buffer=2000, overlong_penalty=0.0)
    shaped = weigh(name, given, overlong_buffer=2000, overlong_penalty=0.25)
    lost = [a - b for a, b in zip(plain.rewards, shaped.rewards, strict=True)]
    assert lost == pytest.approx([0, 0, 0.25 * 0.2, 0.25])
    assert plain.advantages == pytest.approx(weigh(name, given).advantages)
    assert plain.advantages[3] > shaped.advantages[3] + 0.01


def test_o1_pruner_clips_and_standardizes_as_its_code_does() -> None:
    """A z-score divides by the count."""
    short = group((100, 8000), (1, 0), reference=REFERENCE)
    assert weigh("o1_pruner", short).rewards == pytest.approx((21.5, -2.225))
    assert weigh("o1_pruner", short, clip_rewards=True).rewards == (4.0, -2.0)
    batch = [short, group(reference=REFERENCE)]
    plain, step = weigh("o1_pruner", *batch).advantages, update("o1_pruner", *batch, z_score=True)
    expected = [(a - fmean(plain)) / pstdev(plain) for a in plain]
    assert step.advantages == pytest.approx(expected, rel=1e-12)
    assert (step.token_weights, step.factor) == ((1.0,) * 6, 1 / 6)
    stored = [facts(num_tokens=9, advantage=value) for value in (0.25, -1.5)]
    fixed = weigh("o1_pruner", Group(responses=stored, limit=9), form="fixed", z_score=True)
    assert fixed.advantages == (0.25, -1.5)


def test_short_rl_rewards_length_only_while_accuracy_holds() -> None:
    for best, rewards in ((0.8, (1.5, 1.25, 0.0, 0.5)), (0.9, (1.0, 1.0, 0.0, 1.0))):
        found = weigh("short_rl", group(), state={"best_accuracy": best}, length_tolerance=700)
        assert found.rewards == rewards


def test_a_dlp_price_follows_accuracy_and_stays_above_zero() -> None:
    run = run_of("a_dlp", first_price=1e-3, price_rate=0.01, reference_accuracy=0.5)
    prices = []
    for correct in ((1, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)):
        prices.append(run.state.price)
        rewards = columns(run.credit([group(correct=correct)])).rewards
        assert rewards[3] == pytest.approx(correct[3] - prices[-1] * 4000)
        run.advance([group(correct=correct)], refills=0)
    assert prices == pytest.approx([1e-3, 3.5e-3, 0.0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "l1_exact", "thinkprune"])
def test_each_share_of_a_batch_is_an_update_of_its_own(name: str) -> None:
    batch = [group(correct=correct, target=EXACT) for correct in ((1, 0, 1, 0), (1, 1, 1, 0))]
    run = run_of(name, updates_per_batch=2)
    assert run.updates(batch, run.credit(batch)) == [update(name, one) for one in batch]
    run = run_of(name, updates_per_batch=3)  # more than there are groups
    updates = run.updates(batch, run.credit(batch))
    assert [len(found.responses) for found in updates] == [0, 4, 4]
    assert [found.factor > 0 for found in updates] == [False, True, True]


@pytest.mark.parametrize(
    ("method", "keys", "expected"),
    [
        (OnPolicySft, {}, {"temperature": 1.0}),
        (Grpo, {"beta": 0.0}, {}),
        # In the only update of a batch a clip has the gradient of likelihood.
        (Laser, {}, {"beta": 0.001, "kl": "k3"}),
        (Laser, {"updates_per_batch": 2}, {"surrogate": TokenClip(high=0.28), "beta": 0.001}),
        (Laser, {"tempered_log_probs": False}, {"beta": 0.001, "temperature": 1.0}),
        (L1Exact, {"updates_per_batch": 2}, {"surrogate": TokenClip(dual=3.0), "beta": 0.001}),
        (Dler, {}, {"beta": 0.0005, "kl": "k2"}),
        (ErRl, {"whiten": "tokens"}, {"kl": "k1"}),
        (
            ErRl,
            {"beta": 0.001, "whiten": "tokens"},
            {"kl": "k1", "token_penalty": TokenPenalty(beta=0.001, whitens=True)},
        ),
        (Kimi, {}, {}),
        (Kimi, {"updates_per_batch": 2, "tau": 0.3}, {"surrogate": SquaredLogRatio(tau=0.3)}),
        (O1Pruner, {}, {"surrogate": SequenceClip()}),
        (SelfDistillation, {}, {"temperature": 1.0, "surrogate": Distillation()}),
    ],
)
def test_objectives(
    method: type[MethodSettings], keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Of log-probabilities at temperature 0.6."""
    found = method(**keys).objective(0.6)
    assert found == Objective(**{"temperature": 0.6, **expected})
    assert found.needs_reference == (expected.get("beta", 0) > 0 or "token_penalty" in expected)
    assert found.has_teacher == (method is SelfDistillation)
    assert found.keeps_frozen_model == (found.needs_reference or found.has_teacher)
    assert found.is_weighted_likelihood == (expected.keys() <= {"temperature", "kl"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("name=thinkprune limits=[3000,2000]", "has 2 stages: give method.stage_steps the"),
        ("name=thinkprune stage_steps=[5]", "has 0 stages"),
        ("name=thinkprune limits=4000", "rollout.max_response_tokens=3500; raise that one"),
        ("name=l1_exact highest_target=4000", "must ascend in this order"),
        ("name=l1_max lowest_target=3600", "must ascend in this order"),
        ("name=grpo updates_per_batch=3", "=3 does not divide data.prompts_per_step=64; choose a"),
        ("name=laser target=8192", "method.target=8192 is more than a response can have"),
        ("name=laser_d lowest_target=4096", "method.lowest_target=4096 is more than a"),
        ("name=dler easy_limit=3500", "method.easy_limit=3500 is more than a response can have"),
        ("name=gdpo target=3500", "method.target=3500 is more than a response can have"),
        ("name=er_rl kl=k3", "config key method.kl='k3'"),
        ("name=gfpo kept=9", "method.kept=9 is more than the responses to a problem"),
        ("name=grpo overlong_buffer=3501", "more than the 3500 tokens that a sampled"),
        ("name=o1_pruner form=fixed overlong_buffer=1", "more than the 0 tokens"),
        ("name=grpo advantage=identity max_refills=1", "learns from these as well"),
        ("name=on_policy_sft max_refills=1", "config key method.max_refills"),
        ("name=o1_pruner", "data o1_pruner CONFIG method.form=fixed --out FILE` wrote"),
    ],
)
def test_a_method_that_does_not_fit_is_one_line(keys: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        configured(*keys.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ONLINE)
def test_one_response_a_problem_is_refused_where_responses_are_compared(name: str) -> None:
    keys = [f"name={name}", "rollout.group_size=1"] + ["references=r"] * (name == "o1_pruner")
    if name in ("on_policy_sft", "o1_pruner", "self_distillation"):
        assert configured(*keys).name == name
    else:
        with pytest.raises(UserError, match=f"method.name={name} compares the responses to one"):
            configured(*keys)


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        ("laser", {"target": 37}),
        ("laser_de", {"lowest_target": 19, "highest_target": 300, "target_step": 19}),
        ("gdpo", {"target": 37}),
        ("l1_max", {"lowest_target": 2, "highest_target": 64, "alpha": 0.01640625}),
        ("short_rl", {"length_tolerance": 2}),
        ("a_dlp", {"first_price": 0.0546875, "price_rate": 0.0546875}),
    ],
)
def test_lengths_and_prices_fit_short_responses(name: str, scaled: dict[str, float]) -> None:
    """The authors' values at L = 3,500, times or over 64 / 3,500; what is set stays."""

    def found(limit: int, *more: str) -> dict[str, float]:
        method = configured(f"name={name}", f"rollout.max_response_tokens={limit}", *more)
        return {key: getattr(method, key) for key in scaled}

    assert found(3500) == {key: METHODS[name].model_fields[key].default for key in scaled}
    assert found(64) == pytest.approx(scaled)
    key = min(scaled)
    assert found(64, f"{key}=20") == pytest.approx(scaled | {key: 20})


def test_references_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    path, good = (
        tmp_path / "r.jsonl",
        '{"problem_id": "a", "mean_tokens": 12.5, "accuracy": 0.25}\n',
    )
    path.write_text(good)
    found = method_facts.read_references(path)
    assert found == {"a": ReferenceStatistics(mean_tokens=12.5, accuracy=0.25)}
    method_facts.check_references(found, ["a"], path)
    with pytest.raises(UserError, match="no line for 2 problems, the first b"):
        method_facts.check_references(found, ["a", "b", "c"], path)
    for line in ('{"problem_id": "a"}', "[]", "{", good.replace("12.5", "0")):
        path.write_text(good + line)
        with pytest.raises(UserError, match="r.jsonl, line 2: write an object with problem_id"):
            method_facts.read_references(path)
    with pytest.raises(UserError, match="cannot be read"):
        method_facts.read_references(tmp_path / "none")


def test_monitor_problems_that_are_evaluated_are_refused() -> None:
    method_facts.check_monitor(["a", "b"], ["c"])
    with pytest.raises(UserError, match="1 monitor problems .* such as 'b': "):
        method_facts.check_monitor(["a", "b"], ["c", "b"])
