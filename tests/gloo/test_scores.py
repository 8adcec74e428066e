"""Log-probs and entropies of responses under the trainer's weights, against Hugging Face's."""

import pytest
import torch
from hf_objective import log_probs, of_labels
from hf_reference import evaluated_hf_model
from jobs import Case, build
from tiny_models import samples
from world import World

RESPONSES = samples(4, seed=3)
TEMPERATURE = 0.7
Values = list[tuple[float, ...]]


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
                assert ours == pytest.approx(theirs.tolist(), abs=2e-5)
