"""Drafts for vLLM, without vLLM: what its model runner would ask, and what it is told."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_opsft.config_file import load_config
from megatron_opsft.rollout.draft_length import DraftLength
from megatron_opsft.rollout.limits import engines_steal
from megatron_opsft.rollout.vllm.options import llm_options
from megatron_opsft.rollout.vllm.proposer import (
    MAX_VLLM_DRAFT,
    PROPOSERS,
    NgramProposer,
    SuffixProposer,
)

LIMIT = 64


class Runner:
    """A batch as vLLM's model runner holds it: rows by name, with prompts of any length."""

    def __init__(self, kind: type[Any], tp: int = 1) -> None:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=tp),
            model_config=SimpleNamespace(max_model_len=LIMIT),
        )
        self.proposer = kind(config)
        self.proposer.runner = self
        for size in range(8):  # no pass has to be timed first
            self.proposer._length._costs.note_plain(2**size, 0, 1.0)
        self.input_batch: Any = None

    def step(self, sampled: dict[str, list[int]], prompts: dict[str, list[int]]) -> list[list[int]]:
        tokens = np.zeros((len(sampled), LIMIT), dtype=np.int32)
        for row, name in enumerate(sampled):
            tokens[row, : len(prompts[name])] = prompts[name]
        self.input_batch = SimpleNamespace(
            req_ids=list(sampled),
            token_ids_cpu=tokens,
            num_prompt_tokens=np.array([len(prompts[name]) for name in sampled]),
        )
        drafts: list[list[int]] = self.proposer.propose(
            list(sampled.values()), None, tokens, slot_mappings=None
        )
        return drafts


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are taken as long as they come."""
    monkeypatch.setattr(DraftLength, "choose", lambda *given: list(given[-1]))


PROMPTS = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [9, 8]}


@pytest.mark.usefixtures("longest")
def test_siblings_and_earlier_responses_are_drafts_and_others_are_not() -> None:
    runner = Runner(SuffixProposer)
    text = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
    runner.step({"a": [], "b": [20], "c": [20]}, PROMPTS)  # the prompt of a is still being read
    for token in text[1:-1]:
        drafts = runner.step({"a": [], "b": [token], "c": [token + 100]}, PROMPTS)
    assert drafts[0] == []
    drafts = runner.step({"a": text[:2], "b": text[-1:], "c": [20, 21]}, PROMPTS)
    assert drafts[0] == text[2 : 2 + MAX_VLLM_DRAFT]  # from its sibling, which is ahead
    assert drafts[2] == []  # another problem
    runner.step({}, PROMPTS)  # all have ended
    drafts = runner.step({"new": text[:3]}, {"new": PROMPTS["a"]})
    assert drafts == [text[3 : 3 + MAX_VLLM_DRAFT]]


@pytest.mark.usefixtures("longest")
def test_ngram_reads_the_response_alone() -> None:
    runner = Runner(NgramProposer)
    text = [20, 21, 22, 23]
    drafts = runner.step({"a": text, "b": text[:2]}, PROMPTS)
    assert drafts == [[], []]
    drafts = runner.step({"a": [20, 21], "b": [22]}, PROMPTS)
    assert drafts[0][:4] == [22, 23, 20, 21] and drafts[1] == []


@pytest.mark.usefixtures("longest")
def test_counts_say_how_much_of_the_drafts_was_taken() -> None:
    runner = Runner(NgramProposer)
    runner.step({"a": [20, 21, 22, 23, 20, 21]}, PROMPTS)
    runner.proposer.take_counts()
    runner.step({"a": [22, 23, 99]}, PROMPTS)  # two of the draft's seven, and another token
    counts = runner.proposer.take_counts()
    assert (counts.rows, counts.tokens) == (1, 3)
    assert (counts.drafted, counts.accepted) == (MAX_VLLM_DRAFT, 2)
    assert runner.proposer.take_counts().rows == 0


@pytest.mark.usefixtures("longest")
def test_no_draft_reaches_beyond_the_longest_sequence() -> None:
    runner = Runner(NgramProposer)
    most = LIMIT - len(PROMPTS["a"])
    drafts = runner.step({"a": [20, 21] * ((most - 3) // 2)}, PROMPTS)
    length = len(PROMPTS["a"]) + 2 * ((most - 3) // 2)
    assert 0 < len(drafts[0]) == LIMIT - length - 1 < MAX_VLLM_DRAFT


def test_ranks_of_an_engine_agree_whatever_their_clocks_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    for seconds in (1e-6, 1e3):
        clock = iter(float(n) * seconds for n in range(1000))
        monkeypatch.setattr(
            "megatron_opsft.rollout.vllm.proposer.time.perf_counter", lambda c=clock: next(c)
        )
        runner = Runner(SuffixProposer, tp=2)
        drafts = [runner.step({"a": [20 + n % 3]}, PROMPTS) for n in range(40)]
        seen.append(drafts)
        assert any(draft for (draft,) in drafts)
        assert runner.proposer.take_counts().saved_seconds == 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_vllm_is_given_a_class_that_exists(kind: str) -> None:
    settings: Any = SimpleNamespace(
        speculation=kind, is_cuda=True, under_launcher=True, model_dir="m", dtype="float32", tp=1,
        max_tokens=8, batch_size=2, seed=0, collective_minutes=1.0, gpu_memory_fraction=0.5,
        kv_cache_bytes=None, draft_model=None,
    )  # fmt: skip
    options = llm_options(settings, table=SimpleNamespace())  # type: ignore[arg-type]
    given = options["speculative_config"]
    assert given["method"] == "custom_class"
    assert given["model"] == PROPOSERS[kind]
    assert given["num_speculative_tokens"] == MAX_VLLM_DRAFT
    settings.speculation = "off"
    assert "speculative_config" not in llm_options(settings, table=SimpleNamespace())  # type: ignore[arg-type]


def test_engines_whose_responses_depend_on_drafts_do_not_take_work_from_each_other() -> None:
    """`rollout.dealing=auto`: who answers would be seen in the responses."""

    def steal(engine: str, speculation: str) -> bool:
        keys = [f"rollout.engine={engine}", f"rollout.speculation={speculation}"]
        keys += ["model.path=m", "data.train=problems.jsonl", "model.dtype=float32"]
        return engines_steal(load_config(None, keys), 2, is_cuda=True)

    assert steal("vllm", "off") and not steal("vllm", "suffix")
    assert steal("hf", "off") and steal("hf", "suffix")
