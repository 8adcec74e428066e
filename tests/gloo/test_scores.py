"""Log-probs and entropies of responses under the trainer's weights, against Hugging Face's."""

from collections.abc import Sequence

import pytest
import torch
from hf_objective import log_probs, of_labels
from hf_reference import evaluated_hf_model, hf_model
from jobs import Case, build
from sampled import engine_of, noted_logits
from tiny_models import samples
from world import World

from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.requests import make_requests

RESPONSES = samples(4, seed=3)
TEMPERATURE = 0.7
HYBRID = [Case(model="qwen3_5", tp=2, pp=2), Case(model="qwen3_5_tied"), Case(model="qwen3_5_moe")]
# Some end early, and their rows are dropped.
SAMPLING = SamplingSettings(
    temperature=1.0, top_p=1.0, max_response_tokens=24, end_token_ids=tuple(range(30))
)
Values = list[tuple[float, ...]]


def bound(case: Case) -> float:
    """How far log-probs may be apart. Rounding of the embedding alone moves those of the small
    models with delta nets by 1e-5 to 2e-4 (measured in float64).
    """
    return 1e-4 if case.model.startswith("qwen3_5") else 2e-5


def score(case: Case) -> tuple[Values, Values]:
    """Log-probs and entropies."""
    trainer = build(case).trainer
    return (
        trainer.score(RESPONSES, temperature=TEMPERATURE),
        trainer.score(RESPONSES, temperature=TEMPERATURE, entropy=True),
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(tp=2, pp=2),
        Case(cp=2),
        Case(cp=2, tp=2),
        Case(cp=2, pp=2),
        Case(model="qwen3_yarn", cp=2),
        Case(model="qwen3_5", tp=2, pp=2),
        Case(model="qwen3_yarn", cp=2, tp=2),
        *HYBRID,
    ],
    ids=str,
)
def test_log_probs_and_entropies_match_hf(world: World, case: Case) -> None:
    model = evaluated_hf_model(case.model)
    for of_rank in world.run(score, case.world_size, case):
        for sample, *found in zip(RESPONSES, *of_rank, strict=True):
            with torch.no_grad():
                log_p = log_probs(model, sample.prompt_ids, sample.response_ids, TEMPERATURE)
            entropies = torch.distributions.Categorical(logits=log_p).entropy()
            for ours, theirs in zip(
                found, (of_labels(log_p, sample.response_ids), entropies), strict=True
            ):
                assert ours == pytest.approx(theirs.tolist(), abs=bound(case))


def score_sampled(case: Case) -> list[tuple[Sequence[float], list[float]]]:
    """For each response that the engine samples in a padded batch: the trainer's log-probs, and
    those from which the engine drew.
    """
    trainer, engine = build(case).trainer, engine_of(hf_model(case.model))
    requests = []
    for number, sample in enumerate(RESPONSES):
        requests += make_requests(str(number), sample.prompt_ids, 3, run_seed=1, step=1)
    with noted_logits() as noted:
        rollouts = engine.generate(requests, SAMPLING)
    pairs = []
    # Only ranks of the last pipeline stage have the trainer's log-probs.
    for request, rollout, ours in zip(requests, rollouts, trainer.score(rollouts), strict=False):
        drawn = noted.log_probs(request, len(ours))
        pairs.append((ours, of_labels(drawn, rollout.response_ids).tolist()))
    return pairs


@pytest.mark.parametrize("case", [Case(), *HYBRID], ids=str)
def test_what_the_engine_sampled_has_the_trainer_s_log_probs(world: World, case: Case) -> None:
    of_ranks = world.run(score_sampled, case.world_size, case)
    pairs = [pair for of_rank in of_ranks for pair in of_rank]
    assert len({len(ours) for ours, _ in pairs}) > 4
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, abs=bound(case))
