"""tokens.jsonl of a diagnosis, and what is made of it: D_t by kind of token and by place, a cloud
and a table of the tokens where it is large, and responses shaded by it.

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

from megatron_opsft.diagnose.cloud import WIDTH, lay_out
from megatron_opsft.report import page
from megatron_opsft.report.plot import Figure, Series, bars, percent, plot
from megatron_opsft.report.table import aligned
from megatron_opsft.report.tables import Section, Table

TOKENS, PAGE = "tokens.jsonl", "report.html"
# Words with which a response turns back, doubts or checks; those that conclude (so, therefore,
# thus) are plain words.
TRANSITIONS = frozenset(
    ("actually", "again", "also", "alternatively", "although", "but", "hm", "hmm", "however")
    + ("maybe", "oh", "ok", "okay", "perhaps", "though", "wait", "well")
)
SINGULAR = frozenset(("i", "me", "my", "mine", "myself"))
PLURAL = frozenset(("we", "us", "our", "ours", "ourselves"))
_WORD = re.compile(r"[^\W\d_]+")
_TAG = re.compile(r"<[^<>\s]+>")
_SHOWN = 20  # responses, bars and rows of a table on the page
_IN_CLOUD = 60  # words
_LARGE = 0.01  # the share of all tokens whose D_t is called large
_THRESHOLDS = (0.1, 0.5, 1.0, 2.0, 5.0)  # nats
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
    large = max(float(kl.quantile(1 - _LARGE)), 1e-12)
    by_kind = _by_kind(tokens)
    told = f"{len(kl):,} tokens of {len(responses):,} responses, D_t {kl.mean():.4f} nats on "
    told += f"average, {kl.max():.3f} at most"
    title = f"{original} against {efficient}"
    text = (
        "D_t = KL(original || efficient) of the next token at every token of the original's own "
        f"responses: {told}. D_t is called large from {large:.3g} nats, which one token in a "
        "hundred reaches."
    )
    places = tokens[kl >= large]
    sections = [
        Section(
            title="Where the models differ most",
            text="What the original says where D_t is large: the larger a word, the larger the sum "
            "of D_t at the places where the original says it.",
            table=_beyond_thresholds(kl),
            plots=[_cloud(places)],
        ),
        Section(
            title="What the efficient model prefers there",
            text="Each token at the place where its D_t is largest.",
            table=_preferences(responses, places["word"].value_counts().to_dict()),
        ),
        Section(
            title="By kind and by place",
            text="",
            table=by_kind,
            plots=[_words(tokens), _along(tokens)],
        ),
        Section(
            title="Responses",
            text="Those with the largest D_t. Full colour is a large D_t; point at a token or tap "
            "it for its number.",
            plots=[_shaded(response, large) for response in _with_largest(responses)],
        ),
    ]
    page.write_page(out, [], title=title, text=text, sections=sections)
    return f"{title}: {told}\n\n{aligned(by_kind.headings, by_kind.rows)}\n"


def _by_kind(tokens: pd.DataFrame) -> Table:
    kinds = tokens.groupby("kind")["kl"].agg(["size", "mean", "sum"])
    kinds = kinds.sort_values("mean", ascending=False, kind="stable")
    total = tokens["kl"].sum() or 1.0
    return Table(
        caption="D_t by kind of token",
        headings=["kind of token", "tokens", "mean D_t", "share of D_t"],
        rows=[
            [kind, f"{count:,}", f"{mean:.4f}", percent(part / total)]
            for kind, count, mean, part in kinds.itertuples()
        ],
    )


def _beyond_thresholds(kl: "pd.Series[float]") -> Table:
    counts = [(limit, int((kl > limit).sum())) for limit in _THRESHOLDS if limit < kl.max()]
    return Table(
        caption="Tokens whose D_t exceeds a threshold",
        headings=["D_t above", "tokens", "of all tokens"],
        rows=[
            [f"{limit:g} nats", f"{count:,}", percent(count / (len(kl) or 1))]
            for limit, count in counts
        ],
    )


def _preferences(responses: Sequence[Mapping[str, Any]], times: Mapping[str, int]) -> Table:
    """A row for each token: the place where its D_t is largest. times: how often it is large."""
    largest: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for response in responses:
        for at in response["alternatives"]:
            token, kl = _shown(response["tokens"][at["position"]]), response["kl"][at["position"]]
            if token not in largest or kl > largest[token][0]:
                largest[token] = kl, at
    rows = []
    for token, (kl, at) in sorted(largest.items(), key=lambda item: -item[1][0])[:_SHOWN]:
        own, other = at["probability"], at["preferred"][0]
        said = [token, f"{times.get(token, 0):,}", f"{kl:.3f}", *_both(own)]
        rows.append([*said, _shown(other["token"]), *_both(other)])
    return Table(
        caption="Tokens of the largest D_t, and what the efficient model prefers",
        headings=[
            *("original says", "times with large D_t", "largest D_t"),
            *("p in the original", "p in the efficient"),
            *("efficient prefers", "p in the original", "p in the efficient"),
        ],
        rows=rows,
    )


def _both(probabilities: Mapping[str, Any]) -> tuple[str, str]:
    """A token's, under the original and under the efficient model."""
    return percent(probabilities["original"]), percent(probabilities["efficient"])


def _cloud(tokens: pd.DataFrame) -> Markup:
    """tokens: those whose D_t is large."""
    weights = tokens.groupby("word")["kl"].agg(["sum", "size"]).nlargest(_IN_CLOUD, "sum")
    counts = weights["size"].to_dict()
    cloud = lay_out(weights["sum"].to_dict())
    words = [
        Markup('<text class="c{}" transform="{}"><title>{}</title>{}</text>').format(
            number % 7,
            f"translate({word.x} {word.y}) scale({word.size / 12:.3f})",  # of 12 px, in page.css
            f"{word.text}: sum of D = {word.weight:.3g} at {counts[word.text]:,} places",
            word.text,
        )
        for number, word in enumerate(cloud.words)
    ]
    said = ", ".join(word.text for word in cloud.words)
    return Markup(
        '<figure class="cloud"><figcaption>Where D is large: what the original says</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(WIDTH, cloud.height, f"Largest first: {said}", Markup("").join(words))


def _words(tokens: pd.DataFrame) -> Figure:
    words = tokens.groupby("word")["kl"].agg(["sum", "size"]).reset_index()
    words = words.sort_values(["sum", "word"], ascending=[False, True])[:_SHOWN]
    rows = [
        (word, kl, f"{kl:.2g} ({count:,})") for word, kl, count in words.itertuples(index=False)
    ]
    return bars("Sum of D by token (how often)", rows)


def _along(tokens: pd.DataFrame) -> Figure:
    points = list(tokens.groupby("share")["kl"].mean().items())
    along = Series(label="", place=1, points=points)
    return plot("Mean D along a response", [along], x="share before the token", from_zero=True)


def _with_largest(responses: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(responses, key=lambda response: -max(response["kl"]))[:_SHOWN]


def _shown(token: str) -> str:
    """The token as the page writes it: without spaces around it, others visible."""
    bare = token.strip(" ")
    return bare if bare.isprintable() and bare else repr(token)[1:-1].replace(" ", "␣")


def _rows_of(response: Mapping[str, Any]) -> Iterator[tuple[float, str, str, float]]:
    """D_t of each token, its kind, the token as text, and the share of the response before it."""
    tokens, count = response["tokens"], len(response["tokens"])
    for place, (token, kind) in enumerate(zip(tokens, kinds_of(tokens), strict=True)):
        share = place * _BINS // count / _BINS
        yield response["kl"][place], kind, _shown(token), share


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
        if word in TRANSITIONS:
            return "transition word"
        if word in SINGULAR or word in PLURAL:
            return f"first person {'singular' if word in SINGULAR else 'plural'}"
        return "word"
    if "\n" in token:
        return "line break"
    if any(sign.isdigit() for sign in bare):
        return "number"
    return "mathematics" if any(sign in "+-*/=<>^_\\{}$%&|~" for sign in bare) else "punctuation"


def _shaded(response: Mapping[str, Any], full: float) -> Markup:
    """The response, each token shaded by its D_t. full: the D_t that has the full colour."""
    told = {
        at["position"]: "; efficient: "
        + ", ".join(f"{p['token']!r} {100 * p['efficient']:.0f} %" for p in at["preferred"])
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
