"""Log-probs and entropies of responses under the trainer's weights, against Hugging Face's."""

import pytest
import torch
from hf_reference import evaluated_hf_model
from jobs import Case, build
from tiny_models import samples
from world import World

from megatron_opsft.records import Sample

RESPONSES = samples(4, seed=3)


def score(case: Case, temperature: float) -> tuple[list[tuple[float, ...]], ...]:
    """Log-probs and entropies."""
    trainer = build(case).trainer
    return (
        trainer.score(RESPONSES, temperature=temperature),
        trainer.score(RESPONSES, temperature=temperature, entropy=True),
    )


@torch.no_grad()
def expected(sample: Sample, temperature: float) -> tuple[list[float], list[float]]:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    first = len(sample.prompt_ids) - 1
    logits = evaluated_hf_model("qwen2")(input_ids=ids).logits[0, first:-1].double()
    log_probs = (logits / temperature).log_softmax(-1)
    labels = torch.tensor(sample.response_ids)[:, None]
    entropies = torch.distributions.Categorical(logits=log_probs).entropy()
    return log_probs.gather(1, labels)[:, 0].tolist(), entropies.tolist()


@pytest.mark.parametrize(
    "case", [Case(), Case(tp=2, pp=2), Case(cp=2), Case(cp=2, tp=2), Case(cp=2, pp=2)], ids=str
)
def test_log_probs_and_entropies_match_hf(world: World, case: Case) -> None:
    for log_probs, entropies in world.run(score, case.world_size, case, 0.7):
        for number, sample in enumerate(RESPONSES):
            found = (log_probs[number], entropies[number])
            for ours, theirs in zip(found, expected(sample, 0.7), strict=True):
                assert ours == pytest.approx(theirs, abs=2e-5)
