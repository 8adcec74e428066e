"""tokens.jsonl of a diagnosis, and what is made of it: D_t by kind of token and by place, the words
and tokens where it is large, and responses shaded by it.

Of a response of the original model every token has D_t = KL(p_original || p_efficient), the
divergence of the two models' next-token distributions where that token was sampled, in nats.

A line has gold: the problem's answer; outcome: a value of `records.Outcome`; tokens: as pieces of
text that make up the response, its end token included (a character of several tokens is with the
last of them); kl: D_t of each, >= 0; alternatives: as `divergence.diverge` gives them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from megatron_opsft.report import page
from megatron_opsft.report.plot import Series, bars, percent, plot
from megatron_opsft.report.table import aligned
from megatron_opsft.report.tables import Section, Table

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
_SHOWN = 20  # responses and words on the page
_BINS = 20  # of a response's length
_SHADES = 9


def write_page(
    out: Path, responses: Sequence[Mapping[str, Any]], original: str, efficient: str
) -> str:
    """The page of lines of tokens.jsonl; returns D_t by kind of token, as plain text. original,
    efficient: what the models are called. Errors: `UserError`.
    """
    rows = (row for each in responses for row in _rows_of(each))
    tokens = pd.DataFrame(rows, columns=["kl", "kind", "word", "share"])
    kl = tokens["kl"]
    kinds = tokens.groupby("kind")["kl"].agg(["size", "mean", "sum"])
    kinds = kinds.sort_values("mean", ascending=False, kind="stable")
    words = tokens.groupby("word")["kl"].agg(["sum", "size"]).reset_index()
    words = words.sort_values(["sum", "word"], ascending=[False, True])[:_SHOWN]
    along = Series(label="", place=1, points=list(tokens.groupby("share")["kl"].mean().items()))
    headings = ["kind of token", "tokens", "mean D_t", "share of D_t"]
    lines = [
        [kind, f"{count:,}", f"{mean:.4f}", percent(total / (kl.sum() or 1.0))]
        for kind, count, mean, total in kinds.itertuples()
    ]
    plots = [
        bars("Sum of D", [(w, d, f"{d:.2g} ({n})") for w, d, n in words.itertuples(index=False)]),
        plot("Mean D along a response", [along], x="share before the token", from_zero=True),
    ]
    told = f"{len(kl):,} tokens of {len(responses):,} responses, D_t {kl.mean():.4f} nats on "
    told += f"average, {kl.max():.3f} at most"
    full = float(kl.quantile(0.99))
    shown = sorted(responses, key=lambda response: -max(response["kl"]))[:_SHOWN]
    text = (
        "D_t = KL(original || efficient) of the next token at every token of the original's own "
        f"responses: {told}. Below, the responses with the largest: full colour is {full:.3g}, "
        "which one token in a hundred exceeds; point at a token or tap it for its number."
    )
    shaded = [_shaded(response, max(full, 1e-12)) for response in shown]
    title = f"{original} against {efficient}"
    table = Table(caption="D_t by kind of token", headings=headings, rows=lines)
    section = Section(title="By kind and by token", text="", table=table, plots=[*plots, *shaded])
    page.write_page(out, [], title=title, text=text, sections=[section])
    return f"{title}: {told}\n\n{aligned(headings, lines)}\n"


def _rows_of(response: Mapping[str, Any]) -> Iterator[tuple[float, str, str, float]]:
    """D_t of each token, its kind, the token as text, and the share of the response before it."""
    tokens, count = response["tokens"], len(response["tokens"])
    for place, (token, kind) in enumerate(zip(tokens, kinds_of(tokens), strict=True)):
        share = place * _BINS // count / _BINS
        yield response["kl"][place], kind, repr(token.strip(" ") or token), share


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


def _shaded(response: Mapping[str, Any], full: float) -> Markup:
    """The response, each token shaded by its D_t. full: the D_t that has the full colour."""
    told = {
        at["position"]: "; efficient: "
        + ", ".join(f"{text!r} {100 * share:.0f} %" for text, share in at["preferred"])
        for at in response["alternatives"]
    }
    tokens = [
        Markup('<i class="k{}" title="D = {:.4g}{}">{}</i>').format(
            round(_SHADES * min(1.0, kl / full) ** 0.5), kl, told.get(place, ""), token
        )
        for place, (token, kl) in enumerate(zip(response["tokens"], response["kl"], strict=True))
    ]
    return Markup(
        "<figure><figcaption>{problem_id}, sample {sample_index}: {outcome}</figcaption>"
        "<p>{problem}</p><pre>{shaded}</pre></figure>"
    ).format(**response, shaded=Markup("").join(tokens))
