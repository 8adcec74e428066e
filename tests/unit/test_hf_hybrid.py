"""The embedded engine on models whose layers have states of fixed size (gated delta nets), and on
the language model of one that also sees.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_configs import hf_config
from hf_reference import hf_model, log_probs, of_labels
from sampled import NotedLogits, SpellingTokenizer, engine_of, noted_logits
from tiny_models import SHAPES, samples, weights
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForConditionalGeneration
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_5 import modeling_qwen3_5

from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import ResponseRequest, make_requests
from megatron_opsft.rollout.sampling import sample_tokens, uniforms

NAMES = ["qwen3_5", "qwen3_5_tied"]
# Shorter than the convolution, than a chunk of the delta rule, a chunk, and more than two.
PROMPT_LENGTHS = (1, 5, 64, 130)
SETTINGS = SamplingSettings(
    temperature=1.0,
    top_p=0.95,
    max_response_tokens=24,
    end_token_ids=tuple(range(20)),  # some end early, and their rows are dropped
)


def requests_for(lengths: Sequence[int], group_size: int = 3) -> list[ResponseRequest]:
    """Prompts of other tokens than those that end a response."""
    draw = torch.Generator().manual_seed(3)
    requests = []
    for length in lengths:
        prompt = torch.randint(20, 257, (length,), generator=draw).tolist()
        requests += make_requests(f"of-{length}", prompt, group_size, run_seed=1, step=1)
    return requests


@torch.inference_mode()
def largest_difference(
    name: str, requests: Sequence[ResponseRequest], rollouts: Sequence[Rollout], noted: NotedLogits
) -> float:
    """Between the log-probs from which an engine drew and those of a model that reads prompt and
    response alone, in one pass without a cache.
    """
    model, worst = hf_model(name).eval(), 0.0
    for request, rollout in zip(requests, rollouts, strict=True):
        expected = log_probs(model, rollout.prompt_ids, rollout.response_ids)
        found = noted.log_probs(request, len(rollout.response_ids))
        worst = max(worst, float((found - expected).abs().max()))
    return worst


@torch.inference_mode()
def drawn_without_cache(model: PreTrainedModel, request: ResponseRequest) -> tuple[int, ...]:
    """The response by a pass over all tokens for every token."""
    response: list[int] = []
    for uniform in uniforms(torch.tensor([request.seed]), SETTINGS.max_response_tokens)[0]:
        ids = torch.tensor([[*request.prompt_ids, *response]])
        logits_1V = model(input_ids=ids, use_cache=False).logits[:, -1]
        token = sample_tokens(logits_1V, uniform[None], SETTINGS.temperature, SETTINGS.top_p)
        response.append(int(token))
        if response[-1] in SETTINGS.end_token_ids:
            break
    return tuple(response)


@pytest.fixture
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere, also where transformers goes to float32 whatever the model's dtype is."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


@pytest.mark.usefixtures("_in_float64")
def test_nothing_but_rounding_is_between_a_padded_batch_and_a_pass_over_each_response() -> None:
    requests = requests_for(PROMPT_LENGTHS)
    with noted_logits() as noted:
        rollouts = engine_of(hf_model("qwen3_5")).generate(requests, SETTINGS)
    assert {logits.dtype for logits in noted.by_uniform.values()} == {torch.float64}
    assert largest_difference("qwen3_5", requests, rollouts, noted) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_draws_what_each_prompt_alone_does(name: str) -> None:
    """In float32, where rounding moves these models' log-probs by up to 5e-5, those of a pass over
    one response, too.
    """
    requests, engine = requests_for(PROMPT_LENGTHS), engine_of(hf_model(name))
    with noted_logits() as noted:
        together = engine.generate(requests, SETTINGS)
    lengths = {len(rollout.response_ids) for rollout in together}
    assert len(lengths) > 5 and max(lengths) == SETTINGS.max_response_tokens
    assert largest_difference(name, requests, together, noted) < 1e-4
    model = hf_model(name).eval()
    for request, rollout in zip(requests, together, strict=True):
        assert rollout.response_ids == drawn_without_cache(model, request)
        assert engine.generate([request], SETTINGS) == [rollout]


def lose_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding goes into the states."""
    monkeypatch.setattr(modeling_qwen3_5, "create_recurrent_attention_mask", lambda **unused: None)


def keep_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """When rows are dropped, those that stay get states of others."""
    reorder = LinearAttentionLayer.reorder_cache

    def first(self: LinearAttentionLayer, beam_idx: Tensor) -> None:
        fewer = len(beam_idx) < len(self.recurrent_states[0])
        reorder(self, torch.arange(len(beam_idx)) if fewer else beam_idx)

    monkeypatch.setattr(LinearAttentionLayer, "reorder_cache", first)


def keep_the_first_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but of the convolutions' inputs alone."""
    reorder = LinearAttentionLayer.reorder_cache

    def first(self: LinearAttentionLayer, beam_idx: Tensor) -> None:
        fewer, inputs = len(beam_idx) < len(self.conv_states[0]), self.conv_states[0]
        reorder(self, beam_idx)
        if fewer:
            self.conv_states[0] = inputs[: len(beam_idx)].clone()

    monkeypatch.setattr(LinearAttentionLayer, "reorder_cache", first)


@pytest.mark.parametrize("plant", [lose_the_mask, keep_the_first_rows, keep_the_first_convolutions])
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    requests = requests_for(PROMPT_LENGTHS)
    with monkeypatch.context() as planted, noted_logits() as noted:
        plant(planted)
        rollouts = engine_of(hf_model("qwen3_5")).generate(requests, SETTINGS)
    assert largest_difference("qwen3_5", requests, rollouts, noted) > 1e-2


def test_after_a_push_the_engine_is_a_fresh_one_with_these_weights() -> None:
    name, responses = "qwen3_5", samples(4, seed=3)
    values = {key: 0.9 * value + 0.01 for key, value in weights(name).items()}
    assert values["model.layers.0.linear_attn.conv1d.weight"].shape[1:] == (1, 4)
    engine, fresh = (engine_of(hf_model(name, held)) for held in (None, values))
    before = engine.score(responses)
    engine.load_weights(iter(values.items()), version=1)
    assert engine.score(responses) == fresh.score(responses) != before
    requests = requests_for((5,))
    drawn = [each.response_ids for each in engine.generate(requests, SETTINGS)]
    assert drawn == [each.response_ids for each in fresh.generate(requests, SETTINGS)]


@pytest.mark.parametrize("name", NAMES)
def test_of_a_model_that_sees_the_language_model_alone_is_built(tmp_path: Path, name: str) -> None:
    """And computes what the whole model does of a text. The whole model alone says whether its head
    is the embedding.
    """
    shape = replace(SHAPES[name], architecture="Qwen3_5ForConditionalGeneration")
    table, config = WeightTable(shape), hf_config(shape)
    described = config.to_dict()
    del described["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    asked = {"dtype": "float32", "batch_size": 64, "notes_routing": False}
    settings = SimpleNamespace(model_dir=tmp_path, rank=0, world_size=1, **asked)
    engine = HfEngine.from_settings(settings, table, SpellingTokenizer(), torch.device("cpu"))
    held = {key: tuple(value.shape) for key, value in engine.weights().items()}
    assert held == table.hf_shapes()
    of_text = weights(name)
    values = {key: of_text[key.replace("model.language_model.", "model.")] for key in held}
    engine.load_weights(iter(values.items()), version=1)
    whole = Qwen3_5ForConditionalGeneration(config).float().eval()
    missing, unexpected = whole.load_state_dict(values, strict=False)
    assert not unexpected and not set(missing) & set(held)
    responses = samples(4, seed=3)
    scores = engine.score(responses).log_probs
    for sample, found in zip(responses, scores, strict=True):
        with torch.no_grad():
            given = log_probs(whole, sample.prompt_ids, sample.response_ids)
        expected = of_labels(given, sample.response_ids)
        assert found == pytest.approx(expected.tolist(), abs=1e-5)
