"""The parameters of DEER, and what they are in the tokens of a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatron_opsft.config_section import CommaSeparated, Section
from megatron_opsft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN_BOX = re.compile(r"\\boxed\s*\{?$")
_EDGES = re.compile(r"^[\W_]+|[\W_]+$")


class DeerSettings(Section):
    """Defaults: the paper's threshold, the released code's words, texts and limits."""

    threshold: float = Field(
        0.95, ge=0, le=1, description="Exit where the trial answer's confidence is above this."
    )
    transition_words: Annotated[tuple[str, ...], CommaSeparated] = Field(
        ("Wait",),
        min_length=1,
        description="Words at which an answer is tried; each must be one token of the model.",
    )
    trial_prompt: str = Field(
        "\n**Final Answer**\n\\boxed",
        description="Inducer of the trial answer; it ends with an open box.",
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
class DeerTokens:
    """opening: the open box at the end of the inducer. transition_ids: every spelling of the
    transition words.
    """

    opening: str
    transition_ids: frozenset[int]
    think_end_id: int
    trial_prompt_ids: tuple[int, ...]
    exit_ids: tuple[int, ...]

    @classmethod
    def read(cls, settings: DeerSettings, tokenizer: "PreTrainedTokenizerBase") -> "DeerTokens":
        """Errors: `UserError` for a transition word or an end of thinking that is no single token,
        and for texts without what they must have.
        """
        opening = _OPEN_BOX.search(settings.trial_prompt)
        if opening is None:
            raise UserError(
                f"deer.trial_prompt: {settings.trial_prompt!r} does not end with an open box; "
                "end it with \\boxed or \\boxed{"
            )
        think_end_id = _think_end_id(settings.think_end, tokenizer)
        exit_ids = tokenizer.encode(settings.exit_text, add_special_tokens=False)
        if exit_ids.count(think_end_id) != 1:
            raise UserError(
                f"deer.exit_text: {settings.exit_text!r} does not hold {settings.think_end!r} once"
            )
        return cls(
            opening=opening.group(),
            transition_ids=_transition_ids(settings.transition_words, tokenizer) - {think_end_id},
            think_end_id=think_end_id,
            trial_prompt_ids=tuple(
                tokenizer.encode(settings.trial_prompt, add_special_tokens=False)
            ),
            exit_ids=tuple(exit_ids),
        )


def _transition_ids(words: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """All tokens that spell one of the words, with whatever spaces and punctuation around it.

    Upper and lower case are different words. A word that only several tokens spell together would
    have to be distinguished from others that begin alike, behind its end: such words are refused.
    """
    wanted = {_EDGES.sub("", word): word for word in words}
    ids = sorted(tokenizer.get_vocab().values())
    texts = tokenizer.batch_decode(
        [[token_id] for token_id in ids],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    special = set(tokenizer.all_special_ids)
    found: dict[str, list[int]] = {}
    for token_id, text in zip(ids, texts, strict=True):
        bare = _EDGES.sub("", text)
        if bare and bare in wanted and token_id not in special:
            found.setdefault(bare, []).append(token_id)
    for bare, word in wanted.items():
        if bare not in found:
            raise UserError(
                f"deer.transition_words: {word!r} is not a single token of this model; name words "
                "that are and that its thinking has where a thought ends"
            )
    return frozenset(token_id for ids in found.values() for token_id in ids)


def _think_end_id(text: str, tokenizer: "PreTrainedTokenizerBase") -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise UserError(
            f"deer.think_end: {text!r} is not a single token of this model; name the token that "
            "ends its thinking"
        )
    return int(ids[0])
