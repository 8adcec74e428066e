"""STOP's data: correct responses whose thinking ends with the sentence in which the right answer
first stands (the earliest correct node), and then their own answer.

The authors have a language model mark the nodes and their conclusions; here the overthinking meter
finds the first right answer, and a sentence or a line is a node.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter, methodcaller

from megatron_opsft.commands.make_data.samples import collect_rows, find_thinking
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import log
from megatron_opsft.methods.catalog.fixed_data import Stop
from megatron_opsft.methods.facts import select
from megatron_opsft.records import (
    LengthOf,
    Outcome,
    Response,
    Thinking,
    TokenIds,
    TokenUse,
)
from megatron_opsft.rollout.requests import (
    ResponseRequest,
    make_rollouts,
    split_text_by_token,
)
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.runtime.distributed import gather_from_all

# The end of a sentence, with brackets and quotes that close behind it, or of a line.
_NODE_END = re.compile(r"[.!?][^\w\s]*(?=\s|\Z)|[。！？]|\n")
# What becomes of a response.
CUT, WHOLE, NO_NODE, WRONG = "cut", "whole", "no node", "wrong"


def middle(
    responses: Sequence[Response], limit: int, length_of: LengthOf
) -> list[Response]:
    """Choose for each problem the correct response of median length among those that ended within
    `limit` tokens; of an even number the longer of the two in the middle, as the authors' code.
    """
    by_problem = groupby(select(responses, limit), key=attrgetter("problem_index"))
    chosen = []
    for _, group in by_problem:
        ascending = sorted(group, key=methodcaller("length", length_of))
        chosen.append(ascending[len(ascending) // 2])
    return chosen


def node_end(texts: Sequence[str], first_right: int, stop: int) -> int:
    """Return how many tokens end with the sentence, or line, in which the first right answer ends;
    `stop` if none ends before it.

    texts: the text of each token. first_right: tokens up to the end of that answer, at most `stop`.
    """
    # The answer's last token may hold the end of its sentence, too.
    start = first_right - 1
    searched = texts[start:stop]
    end = _NODE_END.search("".join(searched))
    if end is None:
        return stop
    token_ends = list(accumulate(map(len, searched)))
    return start + bisect_left(token_ends, end.end()) + 1


def cut_response(
    token_ids: TokenIds, texts: Sequence[str], use: TokenUse, line_end: TokenIds
) -> TokenIds | None:
    """Return a finished response without the thinking behind its earliest correct node; the whole
    response if nothing follows the node.

    The thinking closes on a line of its own if it did so before. Without thinking, only the end
    token follows the node. None if the thinking is not one that closes, or if the first right
    answer does not lie in it. texts: the text of each token. line_end: the tokens of a line break.
    """
    if use.first_right is None:
        return None
    if use.thinking is Thinking.NONE:
        end = node_end(texts, use.first_right, len(texts) - 1)
        return (*token_ids[:end], token_ids[-1])
    thinking = find_thinking(texts)
    if use.thinking is not Thinking.CLOSED or thinking is None:
        return None
    if not thinking.start < use.first_right <= thinking.stop:
        return None
    end = node_end(texts, use.first_right, thinking.stop)
    kept = "".join(texts[thinking.start : end])
    closes_on_its_line = "".join(texts[thinking]).endswith("\n")
    added = line_end if closes_on_its_line and not kept.endswith("\n") else ()
    return (*token_ids[:end], *added, *token_ids[thinking.stop :])


def stop_rows(
    s: Session, judged: JudgedProblems, settings: Stop
) -> list[StoredResponse]:
    """Return the cut responses that are still correct, the same on every rank, and log what became
    of the others. Called by every rank; each cuts and judges a share of them.
    """
    limit = s.settings.max_response_tokens
    chosen = middle(judged.responses, limit, settings.length_of)
    whole = collect_rows(s, judged, chosen)
    tokenizer = s.sampler.encoder.tokenizer
    line_end = tuple(tokenizer.encode("\n", add_special_tokens=False))
    fates: dict[int, tuple[str, StoredResponse]] = {}
    cut: dict[int, StoredResponse] = {}
    for index in range(s.layout.rank, len(whole), s.layout.world_size):
        row, use = whole[index], _token_use(chosen[index])
        texts = split_text_by_token(tokenizer, row.response_ids)
        response_ids = cut_response(row.response_ids, texts, use, line_end)
        if response_ids is None:
            fates[index] = NO_NODE, row
        elif response_ids == row.response_ids:
            fates[index] = WHOLE, row
        else:
            cut[index] = replace(row, response_ids=response_ids, routing=b"")
    for index, is_right in zip(cut, _are_right(s, judged, cut.values()), strict=True):
        if is_right:
            fates[index] = CUT, cut[index]
        else:
            does_think = _token_use(chosen[index]).thinking is not Thinking.NONE
            fates[index] = WRONG if does_think else WHOLE, whole[index]
    by_index = sorted(gather_from_all(list(fates.items())), key=itemgetter(0))
    counts = Counter(fate for _, (fate, _) in by_index)
    if s.layout.is_main:
        log.info(
            "%d correct responses, one a problem: %d cut, %d kept whole; left out %d with no right "
            "answer in a closed thinking, and %d that are not correct when cut",
            len(by_index),
            *(counts[fate] for fate in (CUT, WHOLE, NO_NODE, WRONG)),
        )
    return [row for _, (fate, row) in by_index if fate in (CUT, WHOLE)]


def _token_use(response: Response) -> TokenUse:
    """Where the tokens of a sampled response went."""
    assert response.token_use is not None, "every sampled response has it"
    return response.token_use


def _are_right(
    s: Session, judged: JudgedProblems, rows: Iterable[StoredResponse]
) -> list[bool]:
    """Judge the texts of this rank's rows: True for each that is correct."""
    rows = list(rows)
    requests = [
        ResponseRequest(
            problem_id=row.problem_id, sample_index=0, prompt_ids=row.prompt_ids, seed=0
        )
        for row in rows
    ]
    rollouts = make_rollouts(
        requests,
        [row.response_ids for row in rows],
        end_token_ids=s.settings.end_token_ids,
        tokenizer=s.sampler.encoder.tokenizer,
        version=0,
    )
    problems = {problem.id: problem for problem in judged.problems}
    verdicts = s.verifier.score(rollouts, problems)
    return [verdict.outcome is Outcome.CORRECT for verdict in verdicts]
