"""Where the tokens of the tiny reasoner's responses went, by string operations: an oracle of the
run's own meter.
"""

import re
from collections.abc import Sequence
from typing import Any

from megatron_opsft.records import FinishReason, Rollout, Thinking, TokenUse
from megatron_opsft.rollout.requests import split_text_by_token


def tokens_up_to(texts: Sequence[str], num_characters: int) -> int:
    """How many tokens it takes to have so many characters. texts: of each token."""
    num_tokens = 0
    while len("".join(texts[:num_tokens])) < num_characters:
        num_tokens += 1
    return num_tokens


def measure(tokenizer: Any, rollout: Rollout, gold: str) -> TokenUse:
    """The first right answer is the gold one behind an equals sign."""
    texts = split_text_by_token(tokenizer, rollout.response_ids)
    thought, closing, _ = rollout.text.partition("</think>")
    if not closing:
        return TokenUse(thinking=Thinking.OPEN, num_thinking=len(texts))
    num_thinking = tokens_up_to(texts, len(thought + closing))
    first = re.search(rf"={gold}(?!\d)", rollout.text)
    if rollout.finish_reason is FinishReason.LENGTH or first is None:
        return TokenUse(thinking=Thinking.CLOSED, num_thinking=num_thinking)
    return TokenUse(
        thinking=Thinking.CLOSED,
        num_thinking=num_thinking,
        first_right=tokens_up_to(texts, first.end()),
    )
