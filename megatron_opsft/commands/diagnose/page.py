"""tokens.jsonl of a diagnosis, and what is made of it: D_t by kind of token and by place, a cloud
and a table of the tokens where it is large, and responses shaded by it.

Of a response of the original model every token has D_t = KL(p_original || p_efficient), the
divergence of the two models' next-token distributions where that token was sampled, in nats.

A line has gold: the problem's answer; outcome: a value of `records.Outcome`; tokens: as pieces of
text that make up the response, its end token included (a character of several tokens is with the
last of them); kl: D_t of each, >= 0; alternatives: as `divergence.diverge` gives them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from megatron_opsft.commands.diagnose.cloud import lay_out
from megatron_opsft.commands.diagnose.directory import (
    FORMAT,
    TOKENS,
    DiagnosisDirectory,
)
from megatron_opsft.commands.diagnose.kinds import kinds_of
from megatron_opsft.commands.report import page
from megatron_opsft.commands.report.chart import Bar, Bars, Chart, Cloud, Series
from megatron_opsft.commands.report.contents import Contents
from megatron_opsft.commands.report.html import MAX_MB
from megatron_opsft.commands.report.page_sections import PageSection
from megatron_opsft.commands.report.table import Table, aligned
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import json_lines
from megatron_opsft.runtime.formatting import count_of, percent

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
    contents = describe(responses, original, efficient)
    contents.write_page(out)
    return contents.text


def read_diagnosis(directory: Path, *, max_mb: float) -> Contents:
    """Tables, charts and page of every response in it. max_mb: as of `report.page.write_page`.

    Errors: `UserError` where it has none yet, or is of an earlier version.
    """
    again = "give its `megatron-opsft diagnose` command again"
    manifest = DiagnosisDirectory(directory).read_manifest() or {}
    if manifest.get("identity", {}).get("format") != FORMAT:
        raise UserError(
            f"{directory}: a diagnosis of an earlier version; {again} with --overwrite"
        )
    path = directory / TOKENS
    responses = [*json_lines(path)] if path.is_file() else []
    if not responses:
        raise UserError(f"{path}: no response is diagnosed yet; {again}")
    names = manifest.get("names") or [
        str(manifest.get(key)).rstrip("/").rpartition("/")[2]
        for key in ("original", "path")
    ]
    return describe(responses, *names, max_mb=max_mb)


def describe(
    responses: Sequence[Mapping[str, Any]],
    original: str,
    efficient: str,
    *,
    max_mb: float = MAX_MB,
) -> Contents:
    """Tables, charts and page of lines of tokens.jsonl. original, efficient: names of the models.

    max_mb: as of `report.page.write_page`.
    """
    rows = (row for each in responses for row in _rows_of(each))
    tokens = pd.DataFrame(rows, columns=["kl", "kind", "word", "share"])
    kl = tokens["kl"]
    large = max(float(kl.quantile(1 - _LARGE)), 1e-12)
    n = f"{len(kl):,} tokens of {len(responses):,} responses"
    by_kind = _by_kind(tokens, n)
    told = f"{n}, D_t {kl.mean():.4f} nats on average, {kl.max():.3f} at most"
    title = f"{original} against {efficient}"
    text = (
        "D_t = KL(original || efficient) of the next token at every token of the original's own "
        f"responses: {told}. D_t is called large from {large:.3g} nats, which one token in a "
        "hundred reaches."
    )
    places = tokens[kl >= large]
    sections = [
        _largest_words(tokens, large, n),
        PageSection(
            title="What the efficient model prefers there",
            text="Each token at the place where its D_t is largest.",
            table=_preferences(responses, places["word"].value_counts().to_dict(), n),
        ),
        PageSection(
            title="By kind and by place",
            text="",
            table=by_kind,
            plots=[_words(tokens, n), _along(tokens, n)],
        ),
    ]
    shaded = PageSection(
        title="Responses",
        text="Those with the largest D_t. Full colour is a large D_t; point at a token or tap "
        "it for its number.",
        plots=[_shaded(response, large) for response in _with_largest(responses)],
    )

    def write(out: Path) -> None:
        shown = [*sections, shaded]
        page.write_page(out, [], title=title, text=text, sections=shown, max_mb=max_mb)

    return Contents(
        text=f"{title}: {told}\n\n{aligned(by_kind.headings, by_kind.rows)}\n",
        write_page=write,
        sections=sections,
        tables=[by_kind, *(section.table for section in sections[:2] if section.table)],
    )


def _largest_words(tokens: pd.DataFrame, large: float, n: str) -> PageSection:
    """The words where D_t is at least `large` nats, and how many tokens exceed each limit."""
    at_large = tokens[tokens["kl"] >= large]
    size = f"n = {len(at_large):,} tokens with D_t from {large:.3g} nats"
    return PageSection(
        title="Where the models differ most",
        text="What the original says where D_t is large: the larger a word, the larger the sum "
        "of D_t at the places where the original says it.",
        table=_beyond_thresholds(tokens["kl"], n),
        plots=[_cloud(at_large, size)],
    )


def _by_kind(tokens: pd.DataFrame, n: str) -> Table:
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
        note=f"n = {n}; no intervals",
    )


def _beyond_thresholds(kl: "pd.Series[float]", n: str) -> Table:
    counts = [
        (limit, int((kl > limit).sum())) for limit in _THRESHOLDS if limit < kl.max()
    ]
    return Table(
        caption="Tokens whose D_t exceeds a threshold",
        headings=["D_t above", "tokens", "of all tokens"],
        rows=[
            [f"{limit:g} nats", f"{count:,}", percent(count / (len(kl) or 1))]
            for limit, count in counts
        ],
        note=f"n = {n}; no intervals",
    )


def _preferences(
    responses: Sequence[Mapping[str, Any]], times: Mapping[str, int], n: str
) -> Table:
    """A row for each token: the place where its D_t is largest. times: how often it is large."""
    largest: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for response in responses:
        for at in response["alternatives"]:
            token, kl = (
                _shown(response["tokens"][at["position"]]),
                response["kl"][at["position"]],
            )
            if token not in largest or kl > largest[token][0]:
                largest[token] = kl, at
    rows = []
    for token, (kl, at) in sorted(largest.items(), key=lambda item: -item[1][0])[
        :_SHOWN
    ]:
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
        note=f"n = {n}; a row is one token, so it has no interval",
    )


def _both(probabilities: Mapping[str, Any]) -> tuple[str, str]:
    """A token's, under the original and under the efficient model."""
    return percent(probabilities["original"]), percent(probabilities["efficient"])


def _cloud(tokens: pd.DataFrame, note: str) -> Cloud:
    """tokens: those whose D_t is large."""
    weights = (
        tokens.groupby("word")["kl"].agg(["sum", "size"]).nlargest(_IN_CLOUD, "sum")
    )
    counts, sums = weights["size"].to_dict(), weights["sum"].to_dict()
    said = {
        word: f"sum of D = {sums[word]:.3g} at {counts[word]:,} places" for word in sums
    }
    words, height = lay_out(sums)
    return Cloud(
        name="words",
        title="Where D is large: what the original says",
        words=[
            replace(word, meaning=f"{word.text}: {said[word.text]}") for word in words
        ],
        height=height,
        note=note,
    )


def _words(tokens: pd.DataFrame, n: str) -> Bars:
    words = tokens.groupby("word")["kl"].agg(["sum", "size"]).reset_index()
    words = words.sort_values(["sum", "word"], ascending=[False, True])[:_SHOWN]
    rows = [
        Bar(label=word, value=kl, text=f"{kl:.2g} ({count:,})", n=n)
        for word, kl, count in words.itertuples(index=False)
    ]
    return Bars(
        name="divergence_by_token",
        title="Sum of D by token (how often)",
        x="sum of D (nats); in brackets: how often",
        rows=rows,
    )


def _along(tokens: pd.DataFrame, n: str) -> Chart:
    means = tokens.groupby("share")["kl"].agg(["mean", "size"])
    points = [(share, mean) for share, mean in means["mean"].items()]
    bins = (
        f"{count_of(means['size'])} tokens in each of {len(points)} parts"
        if points
        else ""
    )
    return Chart(
        name="divergence_along",
        title="Mean D along a response",
        x="share before the token",
        y="mean D (nats)",
        series=[Series(label="", style_index=1, points=points, n=bins)]
        if points
        else [],
        from_zero=True,
        remark=n,
    )


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


def _shaded(response: Mapping[str, Any], full: float) -> Markup:
    """The response, each token shaded by its D_t. full: the D_t that has the full colour."""
    told = {
        at["position"]: "; efficient: "
        + ", ".join(
            f"{p['token']!r} {100 * p['efficient']:.0f} %" for p in at["preferred"]
        )
        for at in response["alternatives"]
    }
    tokens = [
        Markup('<i class="k{}" title="D = {:.4g}{}">{}</i>').format(
            round(_SHADES * min(1.0, kl / full) ** 0.5), kl, told.get(place, ""), token
        )
        for place, (token, kl) in enumerate(
            zip(response["tokens"], response["kl"], strict=True)
        )
    ]
    return Markup(
        "<figure><figcaption>{problem_id}, sample {sample_index}: {outcome}</figcaption>"
        "<p>{problem}</p><pre>{shaded}</pre></figure>"
    ).format(**response, shaded=Markup("").join(tokens))
