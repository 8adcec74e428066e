"""Where the tokens of responses went: the parts of a response's text, which the page colours, and
one bar of the mean lengths of such parts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_opsft.commands.report.chart import Bar, Bars
from megatron_opsft.errors import UserError, log
from megatron_opsft.records import THINK_END, Outcome, Thinking, TokenUse
from megatron_opsft.runtime.durable import whole_lines
from megatron_opsft.runtime.formatting import number

LengthAndUse = tuple[int, TokenUse]
"""Tokens of a response, and where they went."""
_PARTS = ("thinking to the first right answer", "thinking after it", "answer")


def token_use_of(row: Mapping[str, Any]) -> TokenUse | None:
    """Return where the tokens of a stored response went; None if that was not measured.

    row: a line of `rollouts/` or of an evaluation's `samples/`.
    """
    stored = row.get("token_use")
    if not isinstance(stored, dict):
        return None
    known = {name: stored[name] for name in TokenUse._fields if name in stored}
    use = TokenUse(**known)
    is_whole = type(use.num_thinking) is int and type(use.first_right) in (
        int,
        type(None),
    )
    return use if is_whole else None


def parts_of(row: Mapping[str, Any]) -> list[tuple[str, int]] | None:
    """Return the parts of a stored response's text in their order, as (name, characters); None if
    where its tokens went was not measured.

    Names: thinking (up to the first right answer, if there is one), right (the last word of the
    first right answer), after (thinking that follows it), answer (what is not thinking). No part is
    empty. row: as of `token_use_of`.
    """
    use, text = token_use_of(row), row.get("text")
    if use is None or not isinstance(text, str):
        return None
    end = text.rfind(THINK_END)
    if end >= 0:
        end += len(THINK_END)
    else:
        end = len(text) if use.thinking == Thinking.OPEN else 0
    right = row.get("first_right_char")
    if type(right) is not int or not 0 < right <= len(text):
        ends = [("thinking", end), ("answer", len(text))]
    else:
        # Its end alone is known, so the last word up to there stands for it.
        up_to_right = text[:right].rstrip()
        *_, last_word = "", *up_to_right.rsplit(None, 1)
        word = len(up_to_right) - len(last_word)
        if right <= end:
            ends = [("thinking", word), ("right", right), ("after", end)]
            ends.append(("answer", len(text)))
        else:
            ends = [("thinking", end), ("answer", max(end, word))]
            ends += [("right", right), ("answer", len(text))]
    parts = []
    begin = 0
    for name, stop in ends:
        if stop > begin:
            parts.append((name, stop - begin))
            begin = stop
    return parts


def pieces_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the text of a page's row in its parts, as (name, text); one without a name if its
    parts are not known.
    """
    text = row.get("text") or ""
    pieces = []
    begin = 0
    for name, length in row.get("parts") or [("", len(text))]:
        pieces.append((name, text[begin : begin + length]))
        begin += length
    return pieces


def read_token_uses(paths: Sequence[Path]) -> list[LengthAndUse]:
    """Read the correct responses of which it was measured where their tokens went.

    paths: files of `rollouts/` or `samples/`. Damaged lines are left out.
    """
    found = []
    for path in paths:
        try:
            for line in whole_lines(path):
                # Most files of earlier releases have none: then no line is parsed.
                if b'"token_use": {' in line and (use := _parse(line)):
                    found.append(use)
        except UserError as error:
            log.warning("%s; its other responses are left out", error)
    return found


def _parse(line: bytes) -> LengthAndUse | None:
    """Return the length and use of a line's response; None if it is not correct, or damaged."""
    try:
        row = json.loads(line)
        use, num_tokens = token_use_of(row), row["num_tokens"]
        is_correct = row["outcome"] == Outcome.CORRECT
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        return None
    if use is None or not is_correct or type(num_tokens) is not int:
        return None
    return num_tokens, use


def where_tokens_went(groups: Mapping[str, Sequence[LengthAndUse]]) -> Bars | None:
    """Return a bar for each group with its mean tokens of thinking up to the first right answer, of
    thinking after it, and of the answer; None if no group has a first right answer.

    groups: label -> correct responses. Those without a first right answer do not count.
    """
    bars = []
    remark = "mean tokens"
    for label, responses in groups.items():
        lengths = []
        for num_tokens, use in responses:
            if use.first_right is not None:
                num_to_right = min(use.first_right, use.num_thinking)
                num_after = use.num_thinking - num_to_right
                num_answer = num_tokens - use.num_thinking
                lengths.append((num_to_right, num_after, num_answer))
        if not lengths:
            continue
        if len(lengths) < len(responses):
            remark = "mean tokens; of the others no first right answer was found"
        means = [fmean(of_part) for of_part in zip(*lengths, strict=True)]
        bars.append(
            Bar(
                label=label,
                value=sum(means),
                text=" + ".join(map(number, means)),
                n=f"{len(lengths):,} of {len(responses):,} correct responses",
                parts=means,
            )
        )
    if not bars:
        return None
    return Bars(
        name="where_tokens_went",
        title="Where the tokens went",
        x="mean tokens of correct responses",
        rows=bars,
        parts=_PARTS,
        remark=remark,
    )
