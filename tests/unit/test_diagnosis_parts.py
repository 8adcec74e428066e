"""D_t against float64 softmax, the memory that it takes, kinds of tokens, and their text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_cli import ROOT
from hf_reference import hf_model
from live_memory import LiveMemory
from safetensors.torch import save_file
from tiny_models import SHAPES, samples, weights
from torch import Tensor
from transformers import AutoTokenizer

from megatron_opsft.convert.run import convert_model
from megatron_opsft.diagnose import divergence
from megatron_opsft.diagnose.divergence import NUM_PREFERRED, diverge, load_model
from megatron_opsft.diagnose.page import kinds_of
from megatron_opsft.evaluate.inputs import EvalModel
from megatron_opsft.records import Sample
from megatron_opsft.rollout.requests import pieces_of
from megatron_opsft.runtime.device import select_device
from megatron_opsft.weights.rules import WeightTable

HIDDEN = 8
IDS = SimpleNamespace(decode=lambda ids: str(ids[0]))  # of a tokenizer


def loaded(directory: Path, name: str, values: dict[str, Tensor] | None = None) -> Any:
    """values: written there first."""
    if values is not None:
        hf_model(name).config.save_pretrained(directory)
        save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    table = WeightTable(SHAPES[name], "te")
    model = EvalModel(name=name, directory=directory, tokenizer=IDS, end_tokens=(), table=table)
    return load_model(model, torch.float32, select_device("cpu"))


@torch.no_grad()
def log_probs(sample: Sample, model: Any) -> Tensor:
    """float64 [response tokens, vocabulary]: of the next token where each was sampled."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe"])
def test_d_t_and_preferences_match_float64_softmax_and_are_0_of_a_model_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    draw = torch.Generator().manual_seed(1)
    noisy = {
        key: value + 0.02 * torch.randn(value.shape, generator=draw)
        for key, value in weights(name).items()
    }
    p, q = (loaded(tmp_path / key, name, v) for key, v in (("p", weights(name)), ("q", noisy)))
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 7 * 301)  # divides no response's tokens
    for sample in samples(5, seed=3):
        log_p, log_q = log_probs(sample, p), log_probs(sample, q)
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert expected.min() > 1e-4  # far above what is compared
        ids = sample.prompt_ids, sample.response_ids
        kl, alternatives = diverge(p, q, IDS, *ids)
        assert kl == pytest.approx(expected.tolist(), abs=1e-5)
        largest = expected.topk(min(32, len(expected))).indices.tolist()
        assert [each["position"] for each in alternatives] == sorted(largest)
        for each in alternatives:
            likeliest = log_q[each["position"]].exp().topk(NUM_PREFERRED)
            texts, shares = zip(*each["preferred"], strict=True)
            assert texts == tuple(map(str, likeliest.indices.tolist()))
            assert shares == pytest.approx(likeliest.values.tolist(), abs=1e-5)
        kl, alternatives = diverge(p, p, IDS, *ids)
        assert set(kl) == {0.0} and alternatives == []


def test_a_megatron_checkpoint_is_the_model_that_was_converted(tmp_path: Path) -> None:
    name = "qwen3_moe"
    expected = loaded(tmp_path / "hf", name, weights(name)).state_dict()
    convert_model(tmp_path / "hf", tmp_path / "megatron", "megatron")
    found = loaded(tmp_path / "megatron", name).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("tokens", "kinds"),
    [
        ("Wait·,· I· think·\n", "transition word·punctuation·pronoun·word·line break"),
        ("Al·tern·atively", "transition word·transition word·transition word"),
        ("Wait·ing", "word·word"),
        ("So· 12·+·=·.", "word·number·mathematics·mathematics·punctuation"),
        ("</think>·<|im_end|>·</s>", "end of thinking·end of response·end of response"),
        ("· ", "punctuation·punctuation"),
    ],
)
def test_kinds_of_tokens(tokens: str, kinds: str) -> None:
    assert "·".join(kinds_of(tokens.split("·"))) == kinds


@pytest.mark.parametrize(
    "text", ["8-6=2. Wait, 8-6=2.\n</think>\n\\boxed{2}", "ein Öl, 数 und 🙂 x"]
)
def test_pieces_make_up_the_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "megatron_opsft/assets/tiny_reasoner")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


class StandIn:
    """A model that has an output layer and nothing before it."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._head = torch.nn.Linear(HIDDEN, vocab_size, bias=False)
        self._head.weight.data.normal_(generator=self._draw)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self._head

    def base_model(self, input_ids: Tensor, use_cache: bool) -> Any:
        hidden = torch.randn(1, input_ids.shape[1], HIDDEN, generator=self._draw)
        return SimpleNamespace(last_hidden_state=hidden)


def peak_bytes(vocab_size: int, num_tokens: int) -> int:
    p, q = (StandIn(vocab_size, seed) for seed in (0, 1))
    with LiveMemory() as memory:
        diverge(p, q, IDS, (1,), (1,) * num_tokens)  # type: ignore[arg-type]
    return memory.peak_bytes


def test_memory_does_not_grow_with_the_vocabulary_and_by_no_logits_with_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 2**18)
    small, wide = peak_bytes(4096, 1000), peak_bytes(16384, 1000)
    assert small < 6 * 4 * 2**18 + 2**18
    assert wide < 1.05 * small
    assert peak_bytes(4096, 3000) - small < 4 * 256 * 2000  # a sixteenth of their logits
