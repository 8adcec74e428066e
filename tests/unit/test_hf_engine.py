"""The embedded engine on tiny random models, against transformers' generation and exact numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.records import FinishReason, Rollout
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import ResponseRequest, make_requests

VOCAB_SIZE = 97
END = 5
SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    eos_token_id=END,
    bos_token_id=None,
)


class SpellingTokenizer:
    """Every token is its number and a space."""

    def batch_decode(self, sequences: list[list[int]], **kwargs: bool) -> list[str]:
        assert kwargs["skip_special_tokens"] is False
        return ["".join(f"{token} " for token in ids) for ids in sequences]


def _model(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "qwen2_tied":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    elif kind == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))
    else:
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))
    for parameter in model.parameters():  # away from the flat distribution of a fresh model
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    return model.to(dtype)


def _engine(model: PreTrainedModel, batch_size: int = 64) -> HfEngine:
    return HfEngine(model, SpellingTokenizer(), batch_size, version=0)


def _requests(num_prompts: int = 5, group_size: int = 4, seed: int = 0) -> list[ResponseRequest]:
    generator = torch.Generator().manual_seed(3)
    return [
        request
        for i in range(num_prompts)
        for request in make_requests(
            f"problem-{i}",
            torch.randint(6, VOCAB_SIZE, (4 + 3 * i,), generator=generator).tolist(),
            group_size,
            seed,
            step=1,
        )
    ]


def _settings(**changes: object) -> SamplingSettings:
    values = dict(temperature=1.0, top_p=0.95, max_response_tokens=24, end_token_ids=(END,))
    return SamplingSettings(**(values | changes))


@pytest.mark.parametrize(
    ("kind", "temperature"), [("qwen2_tied", 0.0), ("llama", 1e-6), ("mistral", 0.0)]
)
def test_greedy_matches_hf_generate(kind: str, temperature: float) -> None:
    model = _model(kind)
    requests = _requests(group_size=2)
    rollouts = _engine(model).generate(requests, _settings(temperature=temperature, top_p=1.0))
    for rollout in rollouts:
        prompt = torch.tensor([rollout.prompt_ids])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )[0, prompt.shape[1] :]
        assert rollout.response_ids == tuple(expected.tolist())


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_responses_do_not_depend_on_the_batch(kind: str) -> None:
    engine = _engine(_model(kind))
    requests, settings = _requests(), _settings()
    together = engine.generate(requests, settings)
    assert {rollout.finish_reason for rollout in together} == set(FinishReason)
    for batch_size in (7, 16):
        engine.batch_size = batch_size
        assert engine.generate(requests, settings) == together
    engine.batch_size = 64
    alone = [
        rollout
        for request in reversed(requests)
        for rollout in engine.generate([request], settings)
    ]
    assert sorted(alone, key=_key) == sorted(together, key=_key)


def test_responses_come_as_they_finish() -> None:
    engine = _engine(_model("qwen2_tied"), batch_size=6)
    requests, settings = _requests(num_prompts=6, group_size=2), _settings()
    waiting = list(requests)
    asked: list[int] = []

    def take(room: int) -> list[ResponseRequest]:
        asked.append(room)
        return [waiting.pop(0) for _ in range(min(4, len(waiting)))]

    parts = list(engine.stream(take, settings))
    assert asked == [6, 6, 6, 6]
    assert sum(map(bool, parts)) > 4
    came = sorted((rollout for part in parts for rollout in part), key=_key)
    assert came == sorted(engine.generate(requests, settings), key=_key)


def _key(rollout: Rollout) -> tuple[str, int]:
    return rollout.problem_id, rollout.sample_index


def test_order_seeds_and_versions() -> None:
    engine = _engine(_model("llama"))
    requests = _requests(num_prompts=3, group_size=4)
    rollouts = engine.generate(requests, _settings())
    assert [_key(rollout) for rollout in rollouts] == [
        (f"problem-{i}", j) for i in range(3) for j in range(4)
    ]
    assert engine.generate(requests, _settings()) == rollouts
    other_seed = engine.generate(_requests(num_prompts=3, group_size=4, seed=1), _settings())
    assert all(a.response_ids != b.response_ids for a, b in zip(rollouts, other_seed, strict=True))
    assert len({rollout.response_ids for rollout in rollouts}) == 12


def test_end_tokens_and_finish_reasons() -> None:
    engine = _engine(_model("llama"))
    ends = (END, 11, 12, 13)
    rollouts = engine.generate(_requests(group_size=16), _settings(end_token_ids=ends))
    stopped = [r for r in rollouts if r.finish_reason is FinishReason.STOP]
    assert 0 < len(stopped) < len(rollouts)
    for rollout in rollouts:
        *body, last = rollout.response_ids
        assert not set(body) & set(ends)
        if rollout.finish_reason is FinishReason.STOP:
            assert last in ends
            assert rollout.text == "".join(f"{token} " for token in body)
        else:
            assert last not in ends and len(rollout.response_ids) == 24
            assert rollout.text == "".join(f"{token} " for token in rollout.response_ids)
    # An end token in the last place is a stop.
    length = len(stopped[0].response_ids)
    cut = engine.generate(
        _requests(group_size=16), _settings(end_token_ids=ends, max_response_tokens=length)
    )
    assert stopped[0] in cut


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)]
)
def test_logits_that_are_not_finite_end_the_rollout(value: float, dtype: torch.dtype) -> None:
    """Instead of responses made of the vocabulary's last token."""
    model = _model("llama", dtype)
    model.lm_head.weight.data[7] = value
    engine = _engine(model)
    with pytest.raises(NonFiniteError, match=r"logits are NaN or infinite in .* problem problem-"):
        engine.generate(_requests(), _settings())


def test_one_row_that_turns_nan_for_one_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its later logits are finite again before anything is checked."""
    engine = _engine(_model("llama"))
    forward = engine.passes.forward
    calls = []

    def spoil(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        calls.append(len(logits))
        if len(calls) == 3:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(engine.passes, "forward", spoil)
    with pytest.raises(NonFiniteError, match=r"in 1 of 20 responses"):
        engine.generate(_requests(), _settings())


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, value.detach().clone()) for name, value in model.named_parameters())


def test_from_config_and_load_equals_from_pretrained(tmp_path: Path) -> None:
    source = _model("llama", torch.bfloat16)
    source.save_pretrained(tmp_path)
    build = dict(dtype=torch.bfloat16, device="cpu", batch_size=64)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation=GROUPED_SDPA
    )
    loaded = _engine(model)
    empty = HfEngine.from_config(tmp_path, SpellingTokenizer(), **build)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        empty.generate(_requests(), _settings())
    empty.load_weights(_weights(source), version=3)
    for name, buffer in loaded.model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, empty.model.get_buffer(name)), name
    for name, weight in loaded.weights().items():
        assert torch.equal(weight, empty.weights()[name]), name
    rollouts = empty.generate(_requests(), _settings())
    assert {rollout.weight_version for rollout in rollouts} == {3}
    assert [r.response_ids for r in rollouts] == [
        r.response_ids for r in loaded.generate(_requests(), _settings())
    ]
