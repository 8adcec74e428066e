"""The typed records that cross module boundaries, and what a run tells a user's code.

Only `MicroBatch` holds tensors. Token ids are plain tuples, exactly as sampled: a response is never
decoded and tokenised again between sampling and training. torch is not imported here: verifier
workers use these records and must start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(StrEnum):
    """Why a response ended: its own end token, or the length limit L."""

    STOP = "stop"
    LENGTH = "length"


class Outcome(StrEnum):
    """What the verifier says of one response."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNFINISHED = (
        "unfinished"  # hit L without an end token: rejected without being verified
    )


class Message(NamedTuple):
    """One of a chat. role: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem: `text` as the user wrote it (no template), `answer` as the gold string.

    before: messages of the chat that `text` ends, where the row has any.
    fields: the row's other columns that JSON can hold; empty where the judge does not ask for them.
    source_index, row: which source of a mixture it is from, from 0, and which row of that, from 1.
    """

    id: str
    text: str
    answer: str
    before: tuple[Message, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source_index: int = field(default=0, compare=False)
    row: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The tokens of one response, as they are trained on or scored.

    log_probs: of its tokens under the policy that sampled them, where they come with fixed data.
    routing: where they are noted, the experts that the engine chose for every token of prompt and
    response but the last: uint8 [tokens - 1, layers, top_k].
    """

    problem_id: str
    sample_index: int = 0
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    routing: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Sample):
    """One sampled response; `response_ids` includes the end token when there is one."""

    text: str
    finish_reason: FinishReason
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Of a response, one of each for every token: the log-probability with which it was sampled,
    and how many characters of the text are its own.
    """

    log_probs: tuple[float, ...]
    piece_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one response and the answer that was read from it ("" if none was)."""

    outcome: Outcome
    answer: str = ""


NO_RANK = -1  # holds a response: every rank can read it in a file of fixed data


class Response(NamedTuple):
    """What every rank, and a method, knows of a response of a step: all but its tokens and its
    text. A tuple: each rank makes as many as a step of all ranks has responses.

    problem_index: of its problem in the step. num_tokens: of the response, end token included.
    finished: by its own end token. unclosed_think: finished, but the thinking that was begun never
    ends. rank, rollout_index: which rank holds it, and where in that rank's list; `NO_RANK`, and
    its row in the file, for fixed data. advantage: as fixed data say; of no meaning elsewhere.
    """

    problem_index: int
    sample_index: int
    num_prompt_tokens: int
    num_tokens: int
    outcome: Outcome
    finished: bool
    unclosed_think: bool
    rank: int
    rollout_index: int
    advantage: float = 1.0

    @property
    def correct(self) -> bool:
        """Whether the verifier says so."""
        return self.outcome is Outcome.CORRECT

    def is_accepted(self, limit: int) -> bool:
        """Whether it is correct, finished, and within `limit` (Algorithm 1 of the paper)."""
        return self.correct and self.finished and self.num_tokens <= limit

    @property
    def has_answer(self) -> bool:
        """Whether an answer could be read from it, right or wrong."""
        return self.outcome not in (Outcome.NO_ANSWER, Outcome.UNFINISHED)

    @property
    def sequence_tokens(self) -> int:
        """Of prompt and response."""
        return self.num_prompt_tokens + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed sequences (THD): T tokens of S sequences one behind the other, R of them in responses.

    tokens_T, positions_T: int64 [T]; a position is the place in the token's own sequence.
    cu_seqlens: int32 [S + 1], the borders of the sequences; max_seqlen: the longest of them.
    loss_indices_R: int64 [R], ascending: where in the pack the model predicts a response token.
    labels_R: int64 [R], those response tokens; weights_R: float32 [R], the weights of their losses;
    response_lengths: how many of the R each response has.
    A rank of a context-parallel group has its part of a pack in which padding
    ends each sequence: T and R then count that part, cu_seqlens, max_seqlen and response_lengths
    the whole pack. response_indices_R: int64 [R], ascending: which of its response tokens are here;
    None: all.
    What else an objective needs, float32 [R]: advantages_R, and the tokens' log-probabilities under
    the policy that sampled (None: the current one) and under the reference model. Of a teacher, in
    the model's dtype: teacher_RH, its hidden states where it predicts the R tokens, and teacher_VH,
    this rank's rows of its output weight, which all micro-batches share.
    routing_TW: the experts that every token goes to, if not those that the model's routers choose:
    uint8 [T, layers x top_k], in the CPU's memory.
    """

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_indices_R: Tensor
    labels_R: Tensor
    weights_R: Tensor
    response_lengths: tuple[int, ...]
    advantages_R: Tensor | None = None
    old_log_probs_R: Tensor | None = None
    reference_log_probs_R: Tensor | None = None
    teacher_RH: Tensor | None = None
    teacher_VH: Tensor | None = None
    response_indices_R: Tensor | None = None
    routing_TW: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.tokens_T.numel()

    @property
    def num_loss_tokens(self) -> int:
        """R."""
        return self.labels_R.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step; `applied` is False when nothing was accepted anywhere.

    loss: the normalised loss of the global batch; grad_norm: before clipping; both equal on every
    rank, as are, where the objective has them, clip_share: of the trained tokens those whose
    gradient a clip took away, and kl_mean: the divergence from the reference, per trained token.
    """

    applied: bool
    loss: float
    grad_norm: float
    lr: float
    trained_tokens: int
    num_microbatches: int
    clip_share: float | None = None
    kl_mean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """One push of all weights from the trainer to the engine.

    path: "in_place" (slices written into the engine's parameters) or "stream" (whole tensors).
    logprob_diff_*: absolute differences between trainer and engine over the tokens of some
    responses; None where none were scored.
    """

    version: int
    path: str
    logprob_diff_mean: float | None = None
    logprob_diff_max: float | None = None


class Callback:
    """Override the events you want; the others do nothing.

    Called on rank 0 alone, between two pieces of the run's work, which wait for it. An error that
    it raises ends the run; files already written stay.
    """

    def on_step(self, metrics: Mapping[str, float | int]) -> None:
        """After each step; metrics: its line of metrics.jsonl (docs/results.md)."""

    def on_evaluation(self, metrics: Mapping[str, float | int]) -> None:
        """After each evaluation on held-out problems; metrics: its line of evals.jsonl."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """When a checkpoint of the state after `step` updates is whole on disk, which may be some
        steps later.
        """
