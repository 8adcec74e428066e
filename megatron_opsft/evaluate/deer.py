r"""DEER, early exit without training: thinking ends where a trial answer is confident enough.

Source: Yang et al., "Dynamic Early Exit in Reasoning Models" (arXiv 2504.15895), with the parameters
of the released code. Wherever the model samples a transition word ("Wait"), an inducer is put in
the word's place (`\n**Final Answer**\n\boxed`) and the model's greedy answer to it is read. With the
answer's tokens a_1 ... a_n, its confidence is the geometric mean of their probabilities,

    C = (p(a_1) * ... * p(a_n)) ** (1 / n),   p(a_t) = max over the vocabulary, at temperature 1.

C > threshold: the word is dropped, the thinking closed (`\n</think>\n\n`) and the conclusion
sampled. Otherwise the trial is forgotten and the thinking goes on behind the word. After
`max_trials` trials nothing stops the thinking any more.

Where this differs from the released code, and why:
- C is the paper's. The code for DeepSeek's models takes the arithmetic mean by default.
- a_1 ... a_n are the tokens from the one behind the box's opening brace to the one that closes the
  box. The code stops at a list of strings that end with a brace, or after 20 tokens, and averages
  all but the first token. A box that is empty or not closed within the trial is no answer here.
- Trials are greedy, as the formula wants; the code leaves its sampler's temperature at 1.
- A token is a transition when it spells the word, spaces and punctuation aside. The code stops at
  the characters, so inside longer words too.
- Thinking that ends by itself keeps its own closing text; the code writes it anew.
- No budget forcing. The code closes the thinking after 90 % of the budget and forces an answer at
  its end; methods compared with this one get no such help, and it would exceed the budget.
- Sampled tokens are continued as they are, never decoded and tokenised again.
- The paper's variants (several inducers, entropy as the monitor, branches in parallel) are not here.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from megatron_opsft.boxed import find_boxes
from megatron_opsft.config import Section
from megatron_opsft.errors import UserError
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.engine import PromptRequest, RolloutEngine, SamplingSettings
from megatron_opsft.rollout.responses import make_rollouts
from megatron_opsft.rollout.sampling import response_seed

_BOX = "\\boxed"
_EDGES = re.compile(r"^[\W_]+|[\W_]+$")
# A nucleus of one token wherever the most probable one has more than this; a trial with any other
# token is confident of nothing. Smaller numbers drown in the rounding that exact engines allow for.
_GREEDY_TOP_P = 1e-3


class DeerSettings(Section):
    """Defaults: the paper's threshold, the released code's words, texts and limits."""

    threshold: float = Field(
        0.95, ge=0, le=1, description="Exit where the trial answer's confidence is above this."
    )
    transition_words: tuple[str, ...] = Field(
        ("Wait",),
        min_length=1,
        description="Words at which an answer is tried; each must be one token of the model.",
    )
    trial_prompt: str = Field(
        "\n**Final Answer**\n\\boxed",
        description="Inducer of the trial answer; its last box must be left open.",
    )
    max_trial_tokens: int = Field(
        20, ge=1, description="Longest trial answer; one that is longer is not confident."
    )
    max_trials: int = Field(10, ge=1, description="Trials per response; then it thinks to its end.")
    think_end: str = Field("</think>", description="The token that ends the model's thinking.")
    exit_text: str = Field(
        "\n</think>\n\n",
        description="Written on an exit, before the conclusion; counts as part of the response.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExit:
    """A response and what it cost beyond its own tokens.

    rollout: as if sampled in one go: thinking, end of thinking, conclusion, end token.
    extra_tokens: sampled tokens that are not part of it: those of the trials, and the transition
    word that an exit drops. The inducer is read, not sampled, and not counted.
    exited: whether a trial ended the thinking.
    """

    rollout: Rollout
    extra_tokens: int
    num_trials: int
    exited: bool


@dataclass(slots=True, kw_only=True)
class _Response:
    """One response under way; `ids` are those of the response so far."""

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    seed: int
    ids: list[int] = field(default_factory=list)
    num_segments: int = 0
    num_trials: int = 0
    extra_tokens: int = 0
    exited: bool = False
    version: int = 0

    def request(self, context: Sequence[int], seed: int) -> PromptRequest:
        """For what comes after the prompt and `context`."""
        return PromptRequest(
            problem_id=self.problem_id,
            prompt_ids=(*self.prompt_ids, *context),
            sample_indices=(self.sample_index,),
            seeds=(seed,),
        )

    def segment_seed(self) -> int:
        """The first segment has the response's own seed: without any transition the response is
        the one that plain sampling gives.
        """
        if self.num_segments == 0:
            return self.seed
        return response_seed(self.seed, self.num_segments, "deer", self.sample_index)


class Deer:
    """Samples with early exits from any engine, by its `generate` and `score` alone.

    A response depends on its prompt, its seed, the sampling and the weights (as far as the engine
    keeps that promise), not on the others of the call.

    How often the engine is called depends on what it samples. So it must answer this rank without
    the help of others: the Hugging Face engine, vLLM inside the ranks with tp=1, or separate vLLM
    engines (whose ranks act together) in a job of one rank.
    """

    def __init__(
        self,
        settings: DeerSettings,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Errors: `UserError` for an engine that answers another rank, for a transition word or an
        end of thinking that is no single token, and for texts without what they must have.
        """
        if not engine.replica.answers:
            raise UserError(
                "deer: this rank's engine answers another rank, so no trial can be made here; "
                "use tensor-parallel engines of size 1 (rollout.tp=1)"
            )
        box = settings.trial_prompt[settings.trial_prompt.rfind(_BOX) :]
        if _BOX not in settings.trial_prompt or find_boxes(box + "x}"[: box.count("{") * 2]):
            pass
        self._settings = settings
        self._engine = engine
        self._tokenizer = tokenizer
