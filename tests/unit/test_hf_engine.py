"""The embedded engine on tiny random models, against transformers' generation and exact numbers."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_reference import hf_model
from sampled import SpellingTokenizer, engine_of
from tiny_models import SHAPES
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import FinishReason, Rollout
from megatron_opsft.rollout.engine import SamplingSettings, Take
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import ResponseRequest, make_requests

END = 5
TABLE = WeightTable(SHAPES["llama3"])


def model_of(kind: str = "llama3", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Away from the flat distribution of a fresh model; in float64 rounding moves no draw."""
    model = hf_model(kind)
    for parameter in model.parameters():
        parameter.data.mul_(1.6 if parameter.dim() > 1 else 1.0)
    return model.to(dtype)


def requests_for(num_prompts: int = 5, group_size: int = 4, seed: int = 0) -> list[ResponseRequest]:
    """Prompts of 4, 7, 10, ... tokens."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(6, 97, (4 + 3 * n,), generator=draw) for n in range(num_prompts)]
    return [
        request
        for n, prompt in enumerate(prompts)
        for request in make_requests(f"problem-{n}", prompt.tolist(), group_size, seed, step=1)
    ]


def sampling(**changes: Any) -> SamplingSettings:
    usual = {"temperature": 1.0, "top_p": 0.95, "max_response_tokens": 24, "end_token_ids": (END,)}
    return SamplingSettings(**usual | changes)


def key_of(rollout: Rollout) -> tuple[str, int]:
    return rollout.problem_id, rollout.sample_index


@pytest.mark.parametrize(
    ("kind", "temperature", "num_tokens"),
    [
        ("qwen2_tied", 0.0, 24),
        ("llama3", 1e-6, 24),
        ("qwen3", 0.0, 24),
        ("qwen3_yarn", 0.0, 72),  # more than twice the original length
        ("qwen3_5", 0.0, 24),
    ],
)
def test_greedy_matches_hf_generate(kind: str, temperature: float, num_tokens: int) -> None:
    model, engine = model_of(kind), engine_of(model_of(kind))
    settings = sampling(temperature=temperature, top_p=1.0, max_response_tokens=num_tokens)
    rollouts = engine.generate(requests_for(group_size=2), settings)
    assert max(len(rollout.response_ids) for rollout in rollouts) == num_tokens
    for rollout in rollouts:
        prompt = torch.tensor([rollout.prompt_ids])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=END,
            pad_token_id=0,
        )[0, prompt.shape[1] :]
        assert rollout.response_ids == tuple(expected.tolist())


def test_responses_do_not_depend_on_the_batch() -> None:
    engine, requests = engine_of(model_of()), requests_for()
    together = engine.generate(requests, sampling())
    assert {rollout.finish_reason for rollout in together} == set(FinishReason)
    for batch_size in (7, 16):
        engine.batch_size = batch_size
        assert engine.generate(requests, sampling()) == together
    alone = [engine.generate([request], sampling())[0] for request in requests]
    assert alone == together


def test_responses_come_as_they_finish() -> None:
    engine, requests = engine_of(model_of("qwen2_tied"), batch_size=6), requests_for(6, 2)
    waiting, asked = list(requests), []
    settings = sampling(end_token_ids=tuple(range(20)))  # some end early

    def take(room: int) -> list[ResponseRequest]:
        asked.append(room)
        return [waiting.pop(0) for _ in range(min(4, len(waiting)))]

    parts = list(engine.stream(take, settings))
    assert asked == [6, 6, 6, 6]
    assert sum(map(bool, parts)) > 4
    came = sorted((rollout for part in parts for rollout in part), key=key_of)
    assert came == sorted(engine.generate(requests, settings), key=key_of)


def test_responses_come_in_order_and_depend_on_their_seeds() -> None:
    engine = engine_of(model_of())
    rollouts = engine.generate(requests_for(3), sampling())
    assert list(map(key_of, rollouts)) == [(f"problem-{n}", m) for n in range(3) for m in range(4)]
    assert engine.generate(requests_for(3), sampling()) == rollouts
    others = engine.generate(requests_for(3, seed=1), sampling())
    assert len({rollout.response_ids for rollout in rollouts + others}) == 24


def test_the_longest_prompts_are_decoded_first_and_answered_in_the_order_asked() -> None:
    engine, taken = engine_of(model_of()), []
    stream = engine.stream

    def noted(take: Take, settings: SamplingSettings) -> Iterator[list[Rollout]]:
        def taking(room: int) -> Sequence[ResponseRequest]:
            requests = take(min(room, 1))
            taken.extend(len(request.prompt_ids) for request in requests)
            return requests

        return stream(taking, settings)

    engine.stream = noted
    requests = [
        replace(request, prompt_ids=request.prompt_ids[:1] * (3 + number))
        for number, request in enumerate(requests_for(1))
    ]
    rollouts = engine.generate(requests, sampling())
    assert taken == [6, 5, 4, 3]
    assert [len(rollout.prompt_ids) for rollout in rollouts] == [3, 4, 5, 6]


def test_end_tokens_and_finish_reasons() -> None:
    engine, ends = engine_of(model_of()), (END, 11, 12, 13)
    rollouts = engine.generate(requests_for(group_size=16), sampling(end_token_ids=ends))
    stopped = [r for r in rollouts if r.finish_reason is FinishReason.STOP]
    assert 0 < len(stopped) < len(rollouts)
    for rollout in rollouts:
        is_stopped = rollout.finish_reason is FinishReason.STOP
        *body, last = rollout.response_ids
        assert not set(body) & set(ends) and (last in ends) == is_stopped
        assert is_stopped or len(rollout.response_ids) == 24
        written = body if is_stopped else rollout.response_ids
        assert rollout.text == "".join(f"{token} " for token in written)
    # An end token in the last place is a stop.
    short = sampling(end_token_ids=ends, max_response_tokens=len(stopped[0].response_ids))
    assert stopped[0] in engine.generate(requests_for(group_size=16), short)


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)]
)
def test_logits_that_are_not_finite_end_the_rollout(value: float, dtype: torch.dtype) -> None:
    """Instead of responses made of the vocabulary's last token."""
    model = model_of(dtype=dtype)
    model.lm_head.weight.data[7] = value
    with pytest.raises(NonFiniteError, match=r"logits are NaN or infinite in .* problem problem-"):
        engine_of(model).generate(requests_for(), sampling())


def test_one_row_that_turns_nan_for_one_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its later logits are finite again before anything is checked."""
    engine = engine_of(model_of())
    forward, calls = engine.passes.forward, []

    def spoil(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        calls.append(len(logits))
        if len(calls) == 3:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(engine.passes, "forward", spoil)
    with pytest.raises(NonFiniteError, match=r"in 1 of 20 responses"):
        engine.generate(requests_for(), sampling())


def test_from_settings_and_load_equals_from_pretrained(tmp_path: Path) -> None:
    source = model_of(dtype=torch.bfloat16)
    source.save_pretrained(tmp_path)
    loaded = engine_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    asked = {"dtype": "bfloat16", "batch_size": 64, "notes_routing": False}
    settings = SimpleNamespace(model_dir=tmp_path, rank=0, world_size=1, **asked)
    empty = HfEngine.from_settings(settings, TABLE, SpellingTokenizer(), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        empty.generate(requests_for(), sampling())
    empty.load_weights(((name, p.clone()) for name, p in source.named_parameters()), version=3)
    for name, buffer in loaded.model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, empty.model.get_buffer(name)), name
    rollouts = empty.generate(requests_for(), sampling())
    assert {rollout.weight_version for rollout in rollouts} == {3}
    expected = loaded.generate(requests_for(), sampling())
    assert [r.response_ids for r in rollouts] == [r.response_ids for r in expected]


def test_code_beside_the_weights_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    auto_map = {"AutoConfig": "configuration_foreign.ForeignConfig"}
    config = {"model_type": "foreign", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_foreign.py").write_text(
        "from transformers import PretrainedConfig\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class ForeignConfig(PretrainedConfig):\n    model_type = 'foreign'\n"
    )
    monkeypatch.setattr("builtins.input", lambda *unused: "y")
    asked = {"dtype": "bfloat16", "batch_size": 64, "notes_routing": False}
    settings = SimpleNamespace(model_dir=tmp_path, rank=0, world_size=1, **asked)
    with pytest.raises(ValueError, match="custom code"):
        HfEngine.from_settings(settings, TABLE, SpellingTokenizer(), torch.device("cpu"))
    assert not ran.exists()
