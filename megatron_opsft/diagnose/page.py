"""tokens.jsonl of a diagnosis, and what is made of it: D_t by kind of token and by place, the words
and tokens where it is large, and responses shaded by it; a page, and a table for a terminal.

Of a response of the original model every token has D_t = KL(p_original || p_efficient), the
divergence of the two models' next-token distributions where that token was sampled, in nats.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from megatron_opsft.diagnose.divergence import Alternative
from megatron_opsft.errors import UserError, first_line
from megatron_opsft.report.html import render
from megatron_opsft.report.plot import Figure, Series, bars, percent, plot
from megatron_opsft.report.table import aligned
from megatron_opsft.runtime.durable import whole_lines, write_bytes

TOKENS, PAGE = "tokens.jsonl", "report.html"
# Words with which a response turns back, doubts or checks; those that conclude (so, therefore,
# thus) are plain words.
TRANSITIONS = frozenset(
    ("actually", "again", "also", "alternatively", "although", "but", "hm", "hmm", "however")
    + ("maybe", "oh", "ok", "okay", "perhaps", "though", "wait", "well")
)
PRONOUNS = frozenset(("i", "me", "my", "mine", "myself", "we", "us", "our", "ours", "ourselves"))
_WORD = re.compile(r"[^\W\d_]+")
_TAG = re.compile(r"<[^<>\s]+>")
_HIGH_QUANTILE = 0.95  # of all tokens, those above it have a large D_t
_NUM_RESPONSES, _NUM_LARGEST, _NUM_WORDS = 20, 20, 80  # on the page
_RELATIVE_BINS = 20
_EDGES = (0, *(16 << n for n in range(32)))  # where the bins of absolute positions begin
_CONTEXT = 40  # characters before a token of the table
_LEVELS = 9  # of shade, and of a word's size
_LINE_BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedResponse:
    """A line of tokens.jsonl.

    gold: the problem's answer; outcome: a value of `records.Outcome`.
    tokens: as pieces of text that make up the response, its end token included; a character of
    several tokens is with the last of them. kl: D_t of each, >= 0. alternatives: by position.
    """

    problem_id: str
    sample_index: int
    problem: str
    gold: str
    outcome: str
    tokens: tuple[str, ...]
    kl: tuple[float, ...]
    alternatives: tuple[Alternative, ...]

    def __post_init__(self) -> None:
        if len(self.kl) != len(self.tokens):
            raise ValueError(f"{len(self.kl)} divergences of {len(self.tokens)} tokens")


def read_responses(directory: Path) -> Iterator[DiagnosedResponse]:
    """Those of a diagnosis, one by one. Errors: `UserError` naming the line."""
    line_type = TypeAdapter(DiagnosedResponse)
    for number, line in enumerate(whole_lines(directory / TOKENS), start=1):
        try:
            yield line_type.validate_python(json.loads(line))
        except ValueError as error:
            raise UserError(
                f"{directory / TOKENS}:{number}: not a diagnosed response ({first_line(error)}); "
                "restore the file, or diagnose again with --overwrite"
            ) from None


def write_page(directory: Path, original: str, efficient: str) -> str:
    """The page of tokens.jsonl; returns D_t by kind of token, as plain text. original, efficient:
    what the models are called. Errors: `UserError`.
    """
    responses = list(read_responses(directory))
    if not any(each.tokens for each in responses):
        raise UserError(f"{directory / TOKENS}: has no responses; diagnose again with --overwrite")
    tokens = pd.concat([_frame_of(each) for each in responses])
    kl = tokens["kl"]
    tokens["is_high"] = (kl >= kl.quantile(_HIGH_QUANTILE)) & (kl > 0)
    kinds = tokens.groupby("kind").agg(
        count=("kl", "size"), mean=("kl", "mean"), total=("kl", "sum"), high=("is_high", "sum")
    )
    kinds = kinds.sort_values("mean", ascending=False, kind="stable")
    shares = [percent(share) for share in kinds["total"] / (kl.sum() or 1.0)]
    words = tokens[tokens["is_high"]].groupby("word")["kl"].agg(["size", "sum"]).reset_index()
    words = words.sort_values(["sum", "word"], ascending=[False, True])[:_NUM_WORDS]
    full = float(kl.quantile(0.99))
    page = render(
        "diagnosis.html.j2",
        {"runs": []},
        title=f"{original} against {efficient}",
        kl=kl,
        full=full,
        num_responses=len(responses),
        figures=[*_bars(kinds, shares), *_curves(tokens)],
        words=[
            (*row, _level(row[2] / words["sum"].max())) for row in words.itertuples(index=False)
        ],
        largest=_largest(responses),
        responses=[(each, _shades(each, max(full, 1e-12))) for each in responses[:_NUM_RESPONSES]],
    )
    write_bytes(directory / PAGE, page)
    table = aligned(
        ["kind of token", "tokens", "mean D_t", "share of D_t", "large D_t"],
        [
            (kind, f"{count:,}", f"{mean:.4f}", share, f"{high:,}")
            for (kind, count, mean, _, high), share in zip(kinds.itertuples(), shares, strict=True)
        ],
    )
    return (
        f"{original} against {efficient}: {len(kl):,} tokens of {len(responses):,} responses, "
        f"D_t {kl.mean():.4f} nats on average, {kl.max():.3f} at most\n\n{table}\n"
    )


def _frame_of(response: DiagnosedResponse) -> pd.DataFrame:
    """A row a token: D_t, kind, word, and the beginnings of the bins of its place."""
    places = np.arange(len(response.tokens))
    return pd.DataFrame(
        {
            "kl": np.array(response.kl),
            "kind": kinds_of(response.tokens),
            "word": pd.Series(map(_word, response.tokens), dtype=object),
            "share": places * _RELATIVE_BINS // max(len(places), 1) / _RELATIVE_BINS,
            "start": np.array(_EDGES)[np.searchsorted(_EDGES, places, side="right") - 1],
        }
    )


def _word(token: str) -> str:
    """A token without the space around it, line breaks as a sign."""
    return token.strip() + _LINE_BREAK * token.count("\n") or " "


def _bars(kinds: pd.DataFrame, shares: Sequence[str]) -> list[Figure]:
    means = [(kind, mean, f"{mean:.4f}") for kind, mean in kinds["mean"].items()]
    counts = zip(kinds["count"].items(), kinds["total"], shares, strict=True)
    rows = [(f"{kind} ({count:,})", total, share) for (kind, count), total, share in counts]
    return [bars("Mean D", means), bars("Share of all D (tokens)", rows)]


def _curves(tokens: pd.DataFrame) -> list[Figure]:
    """D_t along the responses."""
    found = []
    for column, x in (("share", "share of the response"), ("start", "tokens")):
        points = list(tokens.groupby(column)["kl"].mean().items())
        series = [Series(label="", place=1, points=points)]
        found.append(plot(f"Mean D by {x} before the token", series, x=x, from_zero=True))
    return found


def kinds_of(tokens: Sequence[str]) -> list[str]:
    """What kind of token each is, by the text around it. tokens: all pieces of a response; a token
    with letters counts as the word that its first letter belongs to, whole words of several tokens
    included.
    """
    whole = "".join(tokens)
    word_at = {place: found[0] for found in _WORD.finditer(whole) for place in range(*found.span())}
    starts = accumulate(map(len, tokens), initial=0)
    return [_kind(token, start, word_at) for token, start in zip(tokens, starts, strict=False)]


def _kind(token: str, start: int, word_at: dict[int, str]) -> str:
    bare = token.strip()
    if _TAG.fullmatch(bare):
        return "end of thinking" if bare == "</think>" else "end of response"
    if letter := _WORD.search(token):
        word = word_at[start + letter.start()].lower()
        is_pronoun = word in PRONOUNS
        return "transition word" if word in TRANSITIONS else "pronoun" if is_pronoun else "word"
    if "\n" in token:
        return "line break"
    if any(sign.isdigit() for sign in bare):
        return "number"
    return "mathematics" if any(sign in "+-*/=<>^_\\{}$%&|~" for sign in bare) else "punctuation"


def _largest(responses: Sequence[DiagnosedResponse]) -> list[tuple[str, str, float, Alternative]]:
    """(text before, token, D_t, what the efficient model prefers) where D_t is largest."""
    every = ((each, other) for each in responses for other in each.alternatives)
    falling = sorted(every, key=lambda found: -found[0].kl[found[1].position])
    return [
        (
            "".join(each.tokens[: other.position])[-_CONTEXT:],
            each.tokens[other.position],
            each.kl[other.position],
            other,
        )
        for each, other in falling[:_NUM_LARGEST]
    ]


def _level(share: float) -> int:
    return round(_LEVELS * min(1.0, share) ** 0.5)


def _shades(response: DiagnosedResponse, full: float) -> list[tuple[str, int, str]]:
    """(text, level of shade, what is said when it is pointed at) of each token. full: the D_t that
    has the full colour.
    """
    preferred = {each.position: each.preferred for each in response.alternatives}
    found = []
    for place, (text, kl) in enumerate(zip(response.tokens, response.kl, strict=True)):
        told = f"D = {kl:.4g}"
        if place in preferred:
            told += "; efficient: "
            told += ", ".join(f"{t!r} {100 * p:.0f} %" for t, p in preferred[place])
        found.append((text, _level(kl / full), told))
    return found
