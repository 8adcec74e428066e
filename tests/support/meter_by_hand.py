"""Where the tokens of the tiny reasoner's responses went, by string operations: in place of the
run's own meter in a run of one process.
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

import megatron_opsft.run.step.judged_problems as judged_problems
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.records import FinishReason, Problem, Response, Rollout, Thinking, TokenUse
from megatron_opsft.rollout.requests import split_text_by_token

PRELUDE = "import meter_by_hand; meter_by_hand.install()"


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


def install() -> None:
    """Measure the responses of this process from now on."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / TINY_REASONER)
    shared = judged_problems.share_facts

    def share_facts(
        rollouts: Sequence[Rollout], verdicts: Any, problems: Sequence[Problem], **how: Any
    ) -> list[Response]:
        golds = {problem.id: problem.answer for problem in problems}
        measured = []
        for response in shared(rollouts, verdicts, problems, **how):
            rollout = rollouts[response.rollout_index]
            use = measure(tokenizer, rollout, golds[rollout.problem_id])
            measured.append(response._replace(token_use=use))
        return measured

    judged_problems.share_facts = share_facts
