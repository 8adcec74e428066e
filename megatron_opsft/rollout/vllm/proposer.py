"""Drafts for vLLM, as its `custom_class` proposer: the suffix index of the Hugging Face engine.

vLLM makes one of these classes in every worker, and asks it after each forward pass for what may
come next in every running response. It accepts and rejects drafts by speculative sampling, so that
the distribution of responses is that of the model. Which random numbers a response takes then
depends on its drafts, and so on what was sampled before: a seed no longer gives the same response.
"""

import time
from collections.abc import Sequence
from typing import Any

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.draft_length import DraftLength
from megatron_opsft.rollout.follower import NO_DRAFT, Draft, Follower
from megatron_opsft.rollout.pass_costs import PassShape
from megatron_opsft.rollout.suffix_index import SuffixIndex, TextHistory
from megatron_opsft.rollout.traits import ENGINES

MAX_VLLM_DRAFT = ENGINES["vllm"].max_draft
_PASS, _TOKEN = 1.0, 0.15  # a row of a pass and a draft token, where clocks may not decide


class _Proposer:
    """Drafts of one worker.

    A problem is known by its prompt. What was said to it is never stale: a draft decides how fast
    a response comes, and never what it says.
    """

    alone: bool  # drafts come from a response and its prompt alone
    timed = True  # lengths follow what passes take, not a fixed cost

    def __init__(self, vllm_config: Any) -> None:
        """vllm_config: vLLM's `VllmConfig`, as its interface has it."""
        parallel = vllm_config.parallel_config
        # Several workers that each schedule for themselves must propose the same.
        self._timed = self.timed and parallel.tensor_parallel_size == 1
        self._max_tokens = vllm_config.model_config.max_model_len
        self._length = DraftLength()
        self._history = TextHistory()
        self._running: dict[str, Follower] = {}
        self._prompts: dict[str, str] = {}
        self._indexes: dict[str, SuffixIndex] = {}
        self._drafts: dict[str, Draft] = {}
        self._asked = 0.0
        self.runner: Any = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def take_counts(self) -> DraftCounts:
        """Of everything since it was asked before."""
        counts, self._length.counts = self._length.counts, DraftCounts()
        return counts

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any
    ) -> list[list[int]]:
        """A draft for every row of vLLM's batch; sampled_token_ids: what the last pass gave each,
        nothing where a prompt is still being read.
        """
        batch = self.runner.input_batch
        names = [str(name) for name in batch.req_ids[: len(sampled_token_ids)]]
        began = time.perf_counter()
        fresh = not self._running
        self._drop_ended(set(names))
        known = all(name in self._running for name in names)
        self._note(names, sampled_token_ids, began - self._asked if known else None)
        for row, (name, tokens) in enumerate(zip(names, sampled_token_ids, strict=True)):
            if tokens and name not in self._running:
                self._begin(name, batch, row)
            for token in tokens:
                self._running[name].put(int(token))
        if fresh:
            self._length.open_batch()
        drafts = self._choose(names, sampled_token_ids)
        self._drafts = dict(zip(names, drafts, strict=True))
        # A pass begins where the one before ended: looking for drafts is part of what they cost.
        self._asked = began
        return [tokens for _, tokens in drafts]

    def _choose(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> list[Draft]:
        if self._length.rest(len(names)):
            return [NO_DRAFT] * len(names)
        for index in self._indexes.values():
            index.catch_up()
        drafts = []
        for name, tokens in zip(names, sampled, strict=True):
            draft = NO_DRAFT
            if tokens:
                row = self._running[name]
                draft = row.draft(min(self._max_tokens - len(row.text) - 1, MAX_VLLM_DRAFT))
            drafts.append(draft)
        kinds, lengths = [k for k, _ in drafts], [len(tokens) for _, tokens in drafts]
        most = self._length.choose(self._shape(names), kinds, lengths)
        return [(k, tokens[:n]) for (k, tokens), n in zip(drafts, most, strict=True)]

    def _note(
        self, names: Sequence[str], sampled: Sequence[Sequence[int]], seconds: float | None
    ) -> None:
        """What the last pass gave; seconds: None where it also read prompts."""
        num_drafted = 0
        for name, tokens in zip(names, sampled, strict=True):
            kind, draft = self._drafts.get(name, NO_DRAFT)
            if draft and tokens:
                num_drafted += len(draft)
                self._length.note_draft(kind, len(draft), min(len(tokens) - 1, len(draft)))
        num_rows, num_tokens = len(names), sum(map(len, sampled))
        if not num_rows:
            return
        if seconds is None:
            self._length.counts.rows += num_rows
            self._length.counts.tokens += num_tokens
            return
        if not self._timed:
            seconds = _PASS * num_rows + _TOKEN * num_drafted
        if not num_drafted:
            self._length.note_plain(self._shape(names), seconds)
            return
        saved = self._length.note(self._shape(names), num_drafted, seconds, num_tokens)
        if self._timed:
            self._length.counts.saved_seconds += saved

    def _shape(self, names: Sequence[str]) -> PassShape:
        texts = [len(self._running[name].text) for name in names if name in self._running]
        return PassShape(len(names), len(names), sum(texts) / max(len(texts), 1))

    def _begin(self, name: str, batch: Any, row: int) -> None:
        """A response whose prompt has been read."""
        prompt = batch.token_ids_cpu[row, : int(batch.num_prompt_tokens[row])].tolist()
        problem = " ".join(map(str, prompt))
        text = list(prompt)
        if self.alone:
            index = self._indexes[name] = SuffixIndex([], [text])
        elif problem in self._indexes:
            index = self._indexes[problem]
            index.add(text)
        else:
            index = self._indexes[problem] = SuffixIndex(self._history.of(problem), [text])
        self._running[name] = Follower(text, index)
        self._prompts[name] = problem

    def _drop_ended(self, names: set[str]) -> None:
        """Responses that are not in the batch any more go into the history."""
        for name in self._running.keys() - names:
            text, problem = self._running.pop(name).text, self._prompts.pop(name)
            self._drafts.pop(name, None)
            if self.alone:
                del self._indexes[name]
                continue
            self._history.add(problem, text)
            if problem not in self._prompts.values():
                del self._indexes[problem]


class NgramProposer(_Proposer):
    """`rollout.speculation=ngram`."""

    alone = True


class SuffixProposer(_Proposer):
    """`rollout.speculation=suffix`."""

    alone = False


PROPOSERS = {
    kind: f"{__name__}.{proposer.__name__}"
    for kind, proposer in (("ngram", NgramProposer), ("suffix", SuffixProposer))
}
