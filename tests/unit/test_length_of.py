"""`method.length_of=thinking`: lengths are those of the thinking, wherever a method has one.

That every method's rewards are then those of the same lengths: test_methods.py.
"""

import math
from typing import Any

import pytest
from groups import by_thinking, columns, group, update, weigh
from responses import facts
from test_length_methods import EXACT, MONITOR, REFERENCE, configured, run_of

from megatron_opsft.commands.make_data.samples import o1_choice, shortest
from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import whiten
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.facts import Group
from megatron_opsft.records import Problem, TokenUse


def test_thinkprune_s_stages_limit_the_thinking_and_not_the_sampling() -> None:
    keys = {"limits": [4000, 2000], "stage_steps": [1], "announce_limit": True}
    run = run_of("thinkprune", **keys, length_of="thinking")
    given = by_thinking(group((4001, 4000, 2001, 2000), (1, 1, 1, 1), limit=20_000))
    seen = []
    for _ in range(2):
        assert run.limit is None
        seen.append((run.prompt_change("p").system[-26:], columns(run.credit([given])).rewards))
        run.advance([], refills=0)
    assert seen == [
        ("than 4000 tokens to think.", (0, 1, 1, 1)),
        ("than 2000 tokens to think.", (0, 0, 0, 1)),
    ]


def test_losses_and_whitening_count_tokens_of_whole_responses() -> None:
    """Of 19,990 and 19,901 tokens; the second has the longer thinking."""
    given = by_thinking(group((10, 99), (1, 1)))
    for name, factor in (("linear", 1 / 39_891), ("kimi", 1 / 2), ("er_rl", 1 / 2)):
        step = update(name, given, length_of="thinking")
        assert step.factor == factor
        assert step.advantages[0] > 0 > step.advantages[1]
    assert update("er_rl", given, length_of="thinking").token_weights == (1 / 19_990, 1 / 19_901)
    keys = {"target": 50, "std_epsilon": 0.0, "length_of": "thinking"}
    plain = weigh("gdpo", given, whiten="none", **keys).advantages
    whitened = weigh("gdpo", given, whiten="tokens", **keys).advantages
    counts = [[19_990.0, 19_901.0]]
    assert [list(whitened)] == whiten([list(plain)], counts, "tokens")
    plain = weigh("er_rl", given, length_of="thinking").advantages
    whitened = weigh("er_rl", given, whiten="tokens", length_of="thinking").advantages
    assert [list(whitened)] == whiten([list(plain)], counts, "tokens", count_less=0)


@pytest.mark.parametrize(
    ("name", "keys", "rewards"),
    [
        ("a_dlp", {}, (1, 0)),
        ("ddca", {}, (1, 0)),
        ("er_rl", {}, (0.95, 0)),
        ("gdpo", {}, (2, 1)),
        ("gfpo", {"kept": 2, "keep_by": "reward_per_token"}, (1, 0)),
        ("gr3", {}, (1, 0)),
        ("grpo", {"overlong_buffer": 9}, (1, 0)),
        ("hmpo", {}, (1, 0)),
        ("kimi", {}, (1, 0)),
        ("l1_exact", {}, (0.4, -0.6)),
        ("laser", {}, (1.5, -0.5)),
        ("linear", {}, (1, 0)),
        ("mastery_gated", {}, (1, 0)),
        ("o1_pruner", {}, (2199 + 0.5, 2199 - 1.5)),
        ("short_rl", {}, (1.5, 0)),
        ("smart_thinker", {}, (1, 0)),
    ],
)
def test_responses_that_do_not_think_have_length_zero(
    name: str, keys: dict[str, Any], rewards: tuple[float, ...]
) -> None:
    given = by_thinking(group((0, 0), (1, 0), target=EXACT, reference=REFERENCE))
    found = weigh(name, given, length_of="thinking", **keys)
    assert found.rewards == pytest.approx(rewards)
    assert all(map(math.isfinite, found.advantages))


def test_a_run_s_groups_have_the_length_of_its_method() -> None:
    problems = [Problem(id="p", text="", answer="")]
    use = TokenUse(num_thinking=5)
    responses = [facts(num_tokens=9, token_use=use), facts(num_tokens=7, token_use=TokenUse())]
    for length_of, lengths in (("response", [9, 7]), ("thinking", [5, 0])):
        run = run_of("linear", length_of=length_of)
        (found,) = run.groups(responses, problems, 16)
        assert (found.lengths, found.correct_lengths) == (lengths, lengths)
        assert found.token_counts == [9, 7]
        assert found.within(6) == [float(length <= 6) for length in lengths]


LENGTHLESS = [
    *("name=on_policy_sft", "name=grpo", "name=grpo reward=truncation", "name=dr_grpo"),
    *("name=thinkprune", "name=dler", "name=self_distillation", "name=tokenskip"),
    *("name=step_entropy", "name=off_policy_sft"),
]


@pytest.mark.parametrize("keys", LENGTHLESS)
def test_a_method_without_a_length_refuses_to_measure_thinking(keys: str) -> None:
    """And takes the key where a setting gives it a length."""
    assert configured(*keys.split(), "length_of=response").length_of == "response"
    with pytest.raises(UserError, match="no length but rollout.max_response_tokens, which is of "):
        configured(*keys.split(), "length_of=thinking")
    more = {"dler": "easy_limit=9", "thinkprune": "limits=9", "grpo": "overlong_buffer=9"}
    name = keys.split()[0].removeprefix("name=")
    if name in more:
        found = configured(*keys.split(), "length_of=thinking", more[name])
        assert found.length_of == "thinking"


def test_every_other_method_measures_thinking() -> None:
    refused = {keys.split()[0].removeprefix("name=") for keys in LENGTHLESS}
    for name in METHODS.keys() - refused:
        assert METHODS[name](length_of="thinking").has_length


@pytest.mark.parametrize(("name", "keys"), [("crst", {}), ("o1_pruner", {"form": "fixed"})])
def test_fixed_data_have_their_advantages_whatever_their_lengths_were(
    name: str, keys: dict[str, Any]
) -> None:
    """Nobody has measured them."""
    stored = [facts(num_tokens=9, advantage=value) for value in (0.25, -1.5)]
    given = Group(responses=stored, limit=9, length_of="thinking")
    assert weigh(name, given, length_of="thinking", **keys).advantages == (0.25, -1.5)


def test_laser_targets_cover_thinking() -> None:
    """The same as of responses that are as long, and not those of these responses."""
    run, other = run_of("laser_d", length_of="thinking"), run_of("laser_d")
    run.observe([by_thinking(given) for given in MONITOR])
    other.observe(MONITOR)
    assert run.state == other.state
    assert set(run.state.targets.values()) == {1024, 3072, 5120}


def test_crst_and_o1_pruner_compare_the_thinking_if_asked() -> None:
    uses = {9: 2, 5: 4}
    found = [facts(num_tokens=n, token_use=TokenUse(num_thinking=t)) for n, t in uses.items()]
    assert [r.num_tokens for r in shortest(found, 9, "response")] == [5]
    assert [r.num_tokens for r in shortest(found, 9, "thinking")] == [9]
    settings = O1Pruner(form="fixed", samples_kept=2, length_of="thinking")
    rewards = [reward for _, reward in o1_choice("p", found, settings, 0)]
    assert rewards == pytest.approx([3 / 2 - 1, 3 / 4 - 1])
