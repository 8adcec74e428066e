"""Plans of drafts."""

from dataclasses import replace

import pytest
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.plan.drafts import pass_tokens
from megatron_opsft.plan.estimate import RunEstimate, estimate_run
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.step import StepEstimate, estimate_step

SHAPE = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-7B"]


def step_of(*overrides: str, draft_acceptance: float = 0.0) -> StepEstimate:
    job = make_job(SHAPE, 8, *overrides)
    return estimate_step(job, replace(make_responses(job), draft_acceptance=draft_acceptance))


def run_of(*overrides: str) -> RunEstimate:
    job = make_job(SHAPE, 8, *overrides)
    return estimate_run(job, count_stages(job), make_responses(job), num_steps=10)


def test_tokens_of_a_pass_are_those_up_to_the_first_wrong_one() -> None:
    assert pass_tokens(0.5, 0) == 1.0
    assert pass_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert pass_tokens(0.0, 7) == 1.0 and pass_tokens(1.0, 7) == 8.0


def test_drafts_bring_what_their_acceptance_says_and_nothing_without_one() -> None:
    off, unknown = step_of(), step_of("rollout.speculation=suffix")
    assert off == unknown and off.pass_tokens == 1.0
    steps = [step_of("rollout.speculation=suffix", draft_acceptance=a) for a in (0.3, 0.6, 0.9)]
    seconds = [off.decode, *(step.decode for step in steps)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    tokens = [step.pass_tokens for step in steps]
    assert tokens == sorted(tokens) and tokens[0] > 1.0 and tokens[-1] <= pass_tokens(0.9, 7)
    # Reading the weights is nearly all that a pass of few responses does.
    few = ("rollout.speculation=suffix", "data.prompts_per_step=1")
    assert step_of(*few, draft_acceptance=0.9).pass_tokens == pytest.approx(pass_tokens(0.9, 7))


def test_a_draft_model_always_drafts_and_costs_its_own_weights() -> None:
    model = ("rollout.draft_model=/head", "rollout.draft_tokens=3")
    off, wrong, right = (
        step_of(),
        step_of(*model, draft_acceptance=0.0),
        step_of(*model, draft_acceptance=0.8),
    )
    assert wrong.pass_tokens == 1.0 and wrong.decode > off.decode
    assert right.pass_tokens == pytest.approx(pass_tokens(0.8, 3)) and right.decode < off.decode
    # 1 layer of 28 and a head of its own, three times a pass.
    head, layer = 3584 * 152064, 3584 * (2 * 28 * 128 + 2 * 4 * 128) + 3 * 3584 * 18944
    ratio = (28 * layer + head + 3 * (layer + head)) / (28 * layer + head)
    assert wrong.decode / off.decode < ratio
    assert run_of(*model).kv_tokens < run_of().kv_tokens
