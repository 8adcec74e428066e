"""The overthinking meter: marks in a text as counts of the tokens that were sampled."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.records import (
    FinishReason,
    Outcome,
    Rollout,
    TextMarks,
    Thinking,
    TokenUse,
    Verdict,
)
from megatron_opsft.rollout.token_use import TokenMeter, classify_thinking, repeated_share

END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("tiny_reasoner"))


def sampled(tokenizer: Any, pieces: list[str], reason: FinishReason = FinishReason.STOP) -> Rollout:
    """A response of these pieces of text, each tokenized by itself, and an end token."""
    ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
    return Rollout(
        problem_id="p",
        prompt_ids=(1,),
        response_ids=(*ids, END) if reason is FinishReason.STOP else tuple(ids),
        text="".join(pieces),
        finish_reason=reason,
        weight_version=0,
    )


def num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def test_marks_become_counts_of_the_sampled_tokens(tokenizer: Any) -> None:
    thinking, answer = "8-6=2. Wait, 8-6=2. </think>", " Wait, hmm: \\boxed{2}"
    rollout = sampled(tokenizer, [thinking, answer])
    leak = (len(thinking) + 1, len(thinking + " Wait, hmm"))
    marks = TextMarks(first_right=len("8-6=2"), num_restated=2, num_doubts=3, leak=leak)
    meter = TokenMeter(tokenizer, prompts_open_think=True)
    use = meter.measure(rollout, Verdict(outcome=Outcome.CORRECT, marks=marks))
    behind = num_tokens(tokenizer, thinking + " Wait, hmm") - num_tokens(tokenizer, thinking)
    assert use == TokenUse(
        thinking=Thinking.CLOSED,
        num_thinking=num_tokens(tokenizer, thinking),
        first_right=num_tokens(tokenizer, "8-6=2"),
        num_restated=2,
        num_doubts=3,
        repeated_share=repeated_share(rollout.response_ids),
        num_leaked=use.num_leaked,
    )
    assert use.num_leaked in (behind, behind - 1)  # whether a space is a token of its own


def test_a_token_that_the_tokenizer_lacks_stands_for_no_text(tokenizer: Any) -> None:
    """Embeddings have more rows than tokenizers have tokens, and a model may draw any of them."""
    plain = sampled(tokenizer, ["8-6=2. </think> 2"])
    first, *others = plain.response_ids
    spoilt = replace(plain, response_ids=(first, len(tokenizer) + 40, *others))
    marks = TextMarks(first_right=len("8-6=2"))
    meter = TokenMeter(tokenizer, prompts_open_think=True)
    verdict = Verdict(outcome=Outcome.CORRECT, marks=marks)
    before, now = (meter.measure(rollout, verdict) for rollout in (plain, spoilt))
    assert before.first_right is not None
    assert now.first_right == before.first_right + 1
    assert now.num_thinking == before.num_thinking + 1


def test_a_mark_inside_a_token_counts_the_token(tokenizer: Any) -> None:
    """Whatever character of a token a place is, the token belongs to what comes before."""
    text = "Then 12 = 12. </think> \\boxed{12}"
    rollout = sampled(tokenizer, [text])
    meter = TokenMeter(tokenizer, prompts_open_think=False)
    counts = []
    for place in range(1, len(text) + 1):
        marks = TextMarks(first_right=place)
        verdict = Verdict(outcome=Outcome.CORRECT, marks=marks)
        counts.append(meter.measure(rollout, verdict).first_right)
    ends = []
    for number in range(1, len(rollout.response_ids)):
        ends.append(len(tokenizer.decode(rollout.response_ids[:number])))
    expected = [1 + sum(end < place for end in ends) for place in range(1, len(text) + 1)]
    assert counts == expected


def test_texts_of_several_bytes_a_character_are_counted(tokenizer: Any) -> None:
    """Bytes that the vocabulary has no longer token for are tokens of their own."""
    thinking = "等等, π = 3 </think>"
    rollout = sampled(tokenizer, [thinking, " \\boxed{3}"])
    meter = TokenMeter(tokenizer, prompts_open_think=True)
    use = meter.measure(rollout, Verdict(outcome=Outcome.WRONG, marks=TextMarks(first_right=9)))
    assert use.num_thinking == num_tokens(tokenizer, thinking)
    assert use.first_right == num_tokens(tokenizer, "等等, π = 3")


class SentencePieces:
    """The tokenizer of a SentencePiece model: it drops the space at the beginning of a text."""

    tokens = ("</s>", "▁so", "▁", "2", "</think>", "<0xE2>", "<0x88>", "<0x9A>", "▁is")
    added_tokens_decoder = {4: SimpleNamespace(content="</think>")}

    def __len__(self) -> int:
        return len(self.tokens)

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return [self.tokens[i] for i in ids]


def test_a_sentence_piece_vocabulary_is_counted() -> None:
    rollout = Rollout(
        problem_id="p",
        prompt_ids=(1,),
        response_ids=(1, 8, 5, 6, 7, 3, 4, 2, 3, 0),
        text="so is√2</think> 2",
        finish_reason=FinishReason.STOP,
        weight_version=0,
    )
    meter = TokenMeter(SentencePieces(), prompts_open_think=True)
    marks = TextMarks(first_right=len("so is√2"))
    use = meter.measure(rollout, Verdict(outcome=Outcome.CORRECT, marks=marks))
    assert (use.first_right, use.num_thinking) == (6, 7)


@pytest.mark.parametrize(
    ("text", "by_prompt", "by_itself"),
    [
        ("so 2", Thinking.OPEN, Thinking.NONE),
        ("<think> so 2", Thinking.OPEN, Thinking.OPEN),
        ("so </think> 2", Thinking.CLOSED, Thinking.MALFORMED),
        ("<think> so </think> 2", Thinking.MALFORMED, Thinking.CLOSED),
        ("\n</think>\n2", Thinking.EMPTY, Thinking.MALFORMED),
        ("<think>\n\n</think> 2", Thinking.MALFORMED, Thinking.EMPTY),
        ("so </think> 2 </think> 2", Thinking.MALFORMED, Thinking.MALFORMED),
    ],
)
def test_thinking_may_begin_in_the_prompt(
    text: str, by_prompt: Thinking, by_itself: Thinking
) -> None:
    end = text.rfind("</think>") + len("</think>") if "</think>" in text else None
    assert classify_thinking(text, prompts_open_think=True) == (by_prompt, end)
    assert classify_thinking(text, prompts_open_think=False) == (by_itself, end)


def test_unfinished_responses_only_have_their_thinking(tokenizer: Any) -> None:
    meter = TokenMeter(tokenizer, prompts_open_think=True)
    verdict = Verdict(outcome=Outcome.UNFINISHED)
    rollout = sampled(tokenizer, ["so 8-6=2. " * 9], FinishReason.LENGTH)
    assert meter.measure(rollout, verdict) == TokenUse(Thinking.OPEN, len(rollout.response_ids))
    rollout = sampled(tokenizer, ["so </think>", " 2 is"], FinishReason.LENGTH)
    use = meter.measure(rollout, verdict)
    assert use == TokenUse(Thinking.CLOSED, num_tokens(tokenizer, "so </think>"))


def test_repeated_passages_are_those_of_eight_tokens() -> None:
    once = tuple(range(20))
    assert repeated_share(once) == repeated_share((1,) * 7) == 0.0
    # Of 33 passages the 13 that lie in the second copy alone came before.
    assert repeated_share(once + once) == pytest.approx(13 / 33)
    assert repeated_share((5,) * 18) == pytest.approx(10 / 11)
    assert repeated_share(once + once[::-1]) == 0.0
