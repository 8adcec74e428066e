"""D_t of two models against float64 softmax of Hugging Face's logits, at TP 1 and 2."""

from pathlib import Path

import pytest
import torch
from hf_reference import hf_model
from safetensors.torch import save_file
from tiny_models import samples, weights
from torch import Tensor
from world import World

from megatron_opsft.config import ParallelConfig
from megatron_opsft.diagnose.divergence import NUM_PREFERRED, Divergence, diverge
from megatron_opsft.loss.loss_memory import Chunks
from megatron_opsft.model.frozen import load_frozen
from megatron_opsft.records import Sample
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import start_distributed

RESPONSES = samples(5, seed=3)
CHUNKS = Chunks(tokens=7, rows=50)  # divide neither the tokens nor the vocabulary


def other_weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        name: value + 0.02 * torch.randn(value.shape, generator=draw)
        for name, value in weights("qwen2").items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of two models that differ in every weight."""
    found = []
    for name, values in (("original", weights("qwen2")), ("efficient", other_weights())):
        directory = tmp_path_factory.mktemp(name)
        hf_model("qwen2").config.save_pretrained(directory)
        save_file(values, directory / "model.safetensors")
        found.append(directory)
    return found


def divergences(models: list[Path], tp: int) -> list[list[Divergence]]:
    """Of the two models; then of the original and itself."""
    device = select_device("cpu")
    layout = start_distributed(device, ParallelConfig(tp=tp))
    p, q = (load_frozen(path, dtype="float32", device=device, layout=layout) for path in models)
    return [diverge(p, other, RESPONSES, align=tp, chunks=CHUNKS) for other in (q, p)]


@torch.no_grad()
def log_probs(sample: Sample, values: dict[str, Tensor]) -> Tensor:
    """float64 [response tokens, vocabulary]: of the next token where each was sampled."""
    model = hf_model("qwen2").eval()
    model.load_state_dict(values)
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    return model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].double().log_softmax(-1)


@pytest.mark.parametrize("tp", [1, 2])
def test_d_t_and_preferences_match_float64_softmax_and_are_0_of_a_model_and_itself(
    world: World, models: list[Path], tp: int
) -> None:
    ranks = world.run(divergences, tp, models, tp)
    assert all(found == ranks[0] for found in ranks)
    different, same = ranks[0]
    for sample, found in zip(RESPONSES, different, strict=True):
        log_p, log_q = (log_probs(sample, of) for of in (weights("qwen2"), other_weights()))
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert expected.min() > 1e-3  # far above what is compared
        assert found.kl == pytest.approx(expected.tolist(), abs=1e-5)
        assert [each.position for each in found.preferences] == sorted(
            expected.topk(min(32, len(expected))).indices.tolist()
        )
        for each in found.preferences:
            token, place = sample.response_ids[each.position], each.position
            assert each.p_original == pytest.approx(float(log_p[place, token].exp()), abs=1e-5)
            assert each.p_efficient == pytest.approx(float(log_q[place, token].exp()), abs=1e-5)
            likeliest = log_q[place].exp().topk(NUM_PREFERRED)
            assert [token for token, _ in each.preferred] == likeliest.indices.tolist()
            assert [p for _, p in each.preferred] == pytest.approx(
                likeliest.values.tolist(), abs=1e-5
            )
    for found in same:
        assert set(found.kl) == {0.0} and found.preferences == ()
