"""The typed records that cross module boundaries.

Only `MicroBatch` holds tensors. Token ids are plain tuples, exactly as sampled: a response is never
decoded and tokenised again between sampling and training. torch is not imported here: verifier
workers use these records and must start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
)

if TYPE_CHECKING:
    from torch import Tensor

JsonObject = dict[str, Any]
"""An object of a JSON file: a manifest, a summary, or a line of metrics, samples or evaluations."""

TokenIds = tuple[int, ...]
TensorShape = tuple[int, ...]

LengthOf = Literal["response", "thinking"]
"""What a method takes for the length of a response: all its tokens, or those of its thinking."""

_Class = TypeVar("_Class")


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(field,)
)
def record(cls: type[_Class]) -> type[_Class]:
    """Make a class a record: a dataclass whose fields are given by name and never change."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model wrote its end token."""
    LENGTH = "length"
    """The response reached the length limit L."""


class Outcome(StrEnum):
    """The verifier's judgement of one response."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNFINISHED = "unfinished"
    """It reached L without an end token, and was rejected without being verified."""


THINK, THINK_END = "<think>", "</think>"
"""What opens and what closes the thinking of a response."""


class Thinking(StrEnum):
    """Whether a response thinks between `<think>` and `</think>`, and whether it does so well. A
    prompt that ends with `<think>` has opened the thinking already.
    """

    NONE = "none"
    """It neither begins to think nor ends its thinking."""
    CLOSED = "closed"
    EMPTY = "empty"
    """Nothing but spaces stands in the thinking."""
    OPEN = "open"
    """The thinking begins and never ends."""
    MALFORMED = "malformed"
    """It begins or ends its thinking more than once, or ends one that never began."""


class TokenUse(NamedTuple):
    """Where the tokens of a response went: the overthinking meter. Lengths are in tokens.

    Of an unfinished response, which nobody judges, only the first two fields are known.
    """

    thinking: Thinking = Thinking.NONE
    num_thinking: int = 0
    """Length of the thinking, its last `</think>` included; all tokens behind it are the answer."""
    first_right: int | None = None
    """Length up to the end of the first right answer that the text states; None if the judge finds
    none, or is a user's own.
    """
    num_restated: int = 0
    """How often the right answer is stated again behind the first time."""
    num_doubts: int = 0
    """Turns of self-doubt, such as "Wait"."""
    repeated_share: float = 0.0
    """Share of the words that repeat a passage of the same response."""
    num_leaked: int = 0
    """Length of the thinking that goes on behind `</think>`: from the first turn of self-doubt
    there to the last.
    """


class Message(NamedTuple):
    """A message of a chat."""

    role: str
    """system, user or assistant."""
    content: str


@record
class Problem:
    """A problem with its gold answer."""

    id: str
    text: str
    """The problem as the user wrote it, without a prompt template."""
    answer: str
    """The gold answer."""
    before: tuple[Message, ...] = ()
    """Messages of the chat that come before `text`, if the row has any."""
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The row's other columns, as far as JSON can hold them; empty if the judge needs none."""
    source_index: int = field(default=0, compare=False)
    """Which source of a mixture it is from; the first is 0."""
    row: int = field(default=0, compare=False)
    """Which row of its source it is; the first is 1."""


@record
class Sample:
    """The tokens of one response, to be trained on or scored."""

    problem_id: str
    sample_index: int = 0
    prompt_ids: TokenIds
    response_ids: TokenIds
    """Tokens of the response, with the end token if there is one."""
    log_probs: tuple[float, ...] | None = None
    """Log-probability of each response token under the policy that sampled it; fixed data only."""
    routing: bytes = field(default=b"", repr=False)
    """The experts that the engine chose for every token of prompt and response except the last:
    uint8 [tokens - 1, layers, top_k]; empty if they are not recorded.
    """

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@record
class Rollout(Sample):
    """One sampled response."""

    text: str
    finish_reason: FinishReason
    weight_version: int


@record
class TokenScores:
    """What `run.save_logprobs` saves of each token of one response, in order."""

    log_probs: tuple[float, ...]
    """Log-probability with which the token was sampled."""
    piece_lengths: tuple[int, ...]
    """Number of characters of the response's text that the token stands for."""


@record
class TextMarks:
    """What the verifier notices in the text of a response. Places are counts of characters."""

    first_right: int | None = None
    """Where the first right answer ends; None if none is found."""
    num_restated: int = 0
    """How often the right answer is stated again."""
    num_doubts: int = 0
    """Turns of self-doubt."""
    leak: tuple[int, int] | None = None
    """Where the thinking behind `</think>` begins and ends; None if there is none."""


@record
class Verdict:
    """The verifier's judgement of one response."""

    outcome: Outcome
    answer: str = ""
    """The answer that was read from the response; "" if none was."""
    marks: TextMarks | None = None
    """None if nobody has read the response, or if reading it took too long."""

    @property
    def first_right_char(self) -> int | None:
        """Characters of the text up to the end of the first right answer; None if none is known."""
        return None if self.marks is None else self.marks.first_right


NO_RANK = -1
"""`Response.rank` of fixed data: no rank holds the response, every rank reads it from the file."""


class Response(NamedTuple):
    """All that every rank, and a method, knows about a response of a step: not its tokens and text.

    A tuple, which is cheap: each rank makes one for every response of all ranks.
    """

    problem_index: int
    """Which problem of the step it answers."""
    sample_index: int
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of the response, end token included."""
    outcome: Outcome
    finished: bool
    """True if the response ended with its own end token."""
    rank: int
    """The rank that holds the response; `NO_RANK` for fixed data."""
    rollout_index: int
    """Index in that rank's list of responses; for fixed data the row in the file."""
    advantage: float = 1.0
    """The advantage that fixed data give; meaningless for sampled responses."""
    token_use: TokenUse | None = None
    """Where its tokens went; None for fixed data."""

    @property
    def correct(self) -> bool:
        """True if the verifier judged it correct."""
        return self.outcome is Outcome.CORRECT

    @property
    def unclosed_think(self) -> bool:
        """True if it finished, but the thinking that it began never ends."""
        use = self.token_use
        return self.finished and use is not None and use.thinking is Thinking.OPEN

    def length(self, of: LengthOf) -> int:
        """Tokens of the response, or of its thinking; 0 if it does not think."""
        if of == "response":
            return self.num_tokens
        assert self.token_use is not None, "every sampled response has it"
        return self.token_use.num_thinking

    def is_accepted(self, limit: int, length_of: LengthOf = "response") -> bool:
        """True if it is correct, finished, and within `limit` (Algorithm 1 of the paper)."""
        return self.correct and self.finished and self.length(length_of) <= limit

    @property
    def has_answer(self) -> bool:
        """True if an answer could be read from it, right or wrong."""
        return self.outcome not in (Outcome.NO_ANSWER, Outcome.UNFINISHED)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of prompt and response."""
        return self.num_prompt_tokens + self.num_tokens


@record
class MicroBatch:
    """Packed sequences (THD format): S sequences one after another, T tokens in all, of which R
    are response tokens.

    A rank of a context-parallel group holds a slice of a pack, in which padding ends each sequence.
    T and R then count the slice; `cu_seqlens`, `max_seqlen` and `response_lengths` describe the
    whole pack.
    """

    tokens_T: Tensor
    """int64 [T]: token ids."""
    positions_T: Tensor
    """int64 [T]: position of the token in its own sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1]: where the sequences begin and end."""
    max_seqlen: int
    """Length of the longest sequence."""
    loss_indices_R: Tensor
    """int64 [R], ascending: indices into T at which the model predicts `labels_R`."""
    labels_R: Tensor
    """int64 [R]: the response tokens."""
    weights_R: Tensor
    """float32 [R]: weight of each token's loss."""
    response_lengths: tuple[int, ...]
    """Number of response tokens of each response."""
    advantages_R: Tensor | None = None
    """float32 [R]: advantage of each token's response, if the objective needs it."""
    old_log_probs_R: Tensor | None = None
    """float32 [R]: log-probabilities under the policy that sampled; None: the current policy."""
    reference_log_probs_R: Tensor | None = None
    """float32 [R]: log-probabilities under the reference model, if the objective needs them."""
    teacher_RH: Tensor | None = None
    """[R, H] in the model's dtype: the teacher's hidden states that predict `labels_R`."""
    teacher_VH: Tensor | None = None
    """[V, H] in the model's dtype: this rank's rows of the teacher's output weight. All
    micro-batches share the tensor.
    """
    response_indices_R: Tensor | None = None
    """int64 [R], ascending: which of the pack's response tokens this rank holds; None: all."""
    routing_TW: Tensor | None = None
    """uint8 [T, layers x top_k] in the CPU's memory: the experts that every token goes to; None:
    those that the model's routers choose.
    """

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.tokens_T.numel()

    @property
    def num_loss_tokens(self) -> int:
        """R."""
        return self.labels_R.numel()


@record
class StepResult:
    """The result of one optimizer step; losses, norms and shares are equal on every rank."""

    applied: bool
    """False if no response was accepted on any rank: then the weights did not change."""
    loss: float
    """The normalised loss of the global batch."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    trained_tokens: int
    num_microbatches: int
    clip_share: float | None = None
    """Share of the trained tokens whose gradient a clip removed; None: no clip in the objective."""
    kl_mean: float | None = None
    """Mean divergence from the reference model per trained token; None: not in the objective."""


@record
class SyncResult:
    """The result of one weight sync from the trainer to the engine."""

    version: int
    path: str
    """`in_place` (slices written into the engine's parameters) or `stream` (whole tensors)."""
    logprob_diff_mean: float | None = None
    """Mean absolute difference between the trainer's and the engine's log-probabilities over the
    tokens of some responses; None if no response was scored.
    """
    logprob_diff_max: float | None = None
    """The largest of these differences."""
