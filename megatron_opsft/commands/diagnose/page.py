"""The page of a diagnosis: D_t by kind of token and along the response, a cloud and a table of the
tokens where it is large, and responses shaded by it.

Every token of a response of the original model has D_t = KL(p_original || p_efficient), the
divergence of the two models' next-token distributions where that token was sampled, in nats.

A line of tokens.jsonl has gold: the problem's answer; outcome: a value of `records.Outcome`;
first_right_char: characters up to the end of the first right answer, or null, if there is none;
tokens: as pieces of text that make up the response, its end token included (a character of several
tokens is with the last of them); kl: D_t of each, >= 0; alternatives: as `divergence.diverge` gives
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from megatron_opsft.commands.diagnose.kinds import kinds_of, stages_of
from megatron_opsft.commands.report import page
from megatron_opsft.commands.report.chart import Bar, Bars, Chart, Cloud, Series
from megatron_opsft.commands.report.contents import Contents
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

_Response = Mapping[str, Any]
"""A line of tokens.jsonl."""


def read_diagnosis(directory: Path) -> Contents:
    """Read tables, charts and page of every response of a diagnosis.

    Errors: `UserError` if it has no response yet, or is of an earlier version.
    """
    again = "give its `megatron-opsft diagnose` command again"
    manifest = DiagnosisDirectory(directory).read_manifest() or {}
    if manifest.get("identity", {}).get("format") != FORMAT:
        raise UserError(
            f"{directory}: a diagnosis of an earlier version; {again} with --overwrite"
        )
    path = directory / TOKENS
    responses = list(json_lines(path))
    if not responses:
        raise UserError(f"{path}: no response is diagnosed yet; {again}")
    names = manifest.get("names") or [
        Path(str(manifest.get(key))).name for key in ("original", "path")
    ]
    return describe_divergence(responses, *names)


def describe_divergence(
    responses: Sequence[_Response], original: str, efficient: str
) -> Contents:
    """Return all outputs of lines of tokens.jsonl. original, efficient: names of the models."""
    tokens = _token_table(responses)
    kl = tokens["kl"]
    large = max(float(kl.quantile(1 - _LARGE)), 1e-12)
    size = f"{len(kl):,} tokens of {len(responses):,} responses"
    by_kind = _by(tokens, "kind", "kind of token", size)
    by_stage = _by(tokens, "stage", "where in the response", size)
    summary = f"{size}, D_t {kl.mean():.4f} nats on average, {kl.max():.3f} at most"
    title = f"{original} against {efficient}"
    legend = (
        "D_t = KL(original || efficient) of the next token at every token of the original's own "
        f"responses. D_t is called large from {large:.3g} nats, which one token in a hundred "
        "reaches."
    )
    sections = _sections(responses, tokens, large, size, tables=(by_kind, by_stage))
    return Contents(
        text="\n".join(
            (
                f"{title}: {summary}\n",
                aligned(by_kind.headings, by_kind.rows) + "\n",
                aligned(by_stage.headings, by_stage.rows) + "\n",
            )
        ),
        write_page=partial(
            page.write_page,
            runs=[],
            title=title,
            text=f"{summary}.",
            legend=legend,
            sections=sections,
        ),
        sections=sections,
        tables=[section.table for section in sections if section.table is not None],
    )


def _sections(
    responses: Sequence[_Response],
    tokens: pd.DataFrame,
    large: float,
    size: str,
    *,
    tables: tuple[Table, Table],
) -> list[PageSection]:
    """Return the sections of the page.

    tokens: as of `_token_table`. large: the D_t that is called large. size: how many tokens and
    responses. tables: D_t by kind of token, and by where in the response.
    """
    by_kind, by_stage = tables
    with_large = tokens[tokens["kl"] >= large]
    num_large = with_large["word"].value_counts().to_dict()
    largest_first = sorted(responses, key=lambda response: -max(response["kl"]))
    return [
        PageSection(
            title="Where the models differ most",
            text="What the original says where D_t is large: the larger a word, the larger the "
            "sum of D_t at the places where the original says it.",
            table=_beyond_thresholds(tokens["kl"], size),
            plots=[_cloud(with_large, large)],
        ),
        PageSection(
            title="What the efficient model prefers there",
            text="Each token at the place where its D_t is largest.",
            table=_preferences(responses, num_large, size),
        ),
        PageSection(
            title="By kind and by place",
            table=by_kind,
            plots=[_by_word(tokens, size), _along_response(tokens, size)],
        ),
        PageSection(
            title="Before and after the first right answer",
            text="What the efficient model would say otherwise before the original has the right "
            "answer, and what after it.",
            table=by_stage,
        ),
        PageSection(
            title="Responses",
            text="Those with the largest D_t. Full colour is a large D_t; point at a token or "
            "tap it for its number.",
            plots=[_shaded(response, large) for response in largest_first[:_SHOWN]],
        ),
    ]


def _token_table(responses: Sequence[_Response]) -> pd.DataFrame:
    """Return a row for each token: kl, its D_t; kind; stage, see `stages_of`; word, the token as
    text; share of the response before it.
    """
    rows = []
    for response in responses:
        tokens = response["tokens"]
        stages = stages_of(tokens, response.get("first_right_char"))
        for position, kind in enumerate(kinds_of(tokens)):
            share = position * _BINS // len(tokens) / _BINS
            word = _shown(tokens[position])
            rows.append((response["kl"][position], kind, stages[position], word, share))
    return pd.DataFrame(rows, columns=["kl", "kind", "stage", "word", "share"])


def _by(tokens: pd.DataFrame, column: str, heading: str, size: str) -> Table:
    """Return the table of D_t by a column of `_token_table`, the largest mean first.

    heading: what the column has. size: how many tokens and responses.
    """
    groups = tokens.groupby(column)["kl"].agg(["size", "mean", "sum"])
    groups = groups.sort_values("mean", ascending=False, kind="stable")
    total = tokens["kl"].sum() or 1.0
    return Table(
        caption=f"D_t by {heading}",
        headings=[heading, "tokens", "mean D_t", "share of D_t"],
        rows=[
            [name, f"{count:,}", f"{mean:.4f}", percent(kl_sum / total)]
            for name, count, mean, kl_sum in groups.itertuples()
        ],
        note=f"n = {size}; no intervals",
    )


def _beyond_thresholds(kl: "pd.Series[float]", size: str) -> Table:
    """Return the table of how many tokens exceed each threshold below the largest D_t."""
    rows = []
    for threshold in _THRESHOLDS:
        if threshold < kl.max():
            count = int((kl > threshold).sum())
            rows.append([f"{threshold:g} nats", f"{count:,}", percent(count / len(kl))])
    return Table(
        caption="Tokens whose D_t exceeds a threshold",
        headings=["D_t above", "tokens", "of all tokens"],
        rows=rows,
        note=f"n = {size}; no intervals",
    )


def _preferences(
    responses: Sequence[_Response], num_large: Mapping[str, int], size: str
) -> Table:
    """Return the table of tokens with the largest D_t, each at the position where it is largest.

    num_large: token -> how often its D_t is large.
    """
    largest: dict[str, float] = {}  # token -> its largest D_t
    alternatives: dict[str, Any] = {}  # token -> the alternative there
    for response in responses:
        for alternative in response["alternatives"]:
            position = alternative["position"]
            token = _shown(response["tokens"][position])
            kl = response["kl"][position]
            if token not in largest or kl > largest[token]:
                largest[token] = kl
                alternatives[token] = alternative
    falling = sorted(largest, key=lambda token: -largest[token])
    rows = []
    for token in falling[:_SHOWN]:
        alternative = alternatives[token]
        preferred = alternative["preferred"][0]
        rows.append(
            [
                token,
                f"{num_large.get(token, 0):,}",
                f"{largest[token]:.3f}",
                *_under_both(alternative["probability"]),
                _shown(preferred["token"]),
                *_under_both(preferred),
            ]
        )
    return Table(
        caption="Tokens of the largest D_t, and what the efficient model prefers",
        headings=[
            "original says",
            "times with large D_t",
            "largest D_t",
            "p in the original",
            "p in the efficient",
            "efficient prefers",
            "p in the original",
            "p in the efficient",
        ],
        rows=rows,
        note=f"n = {size}; a row is one token, so it has no interval",
    )


def _under_both(probabilities: Mapping[str, Any]) -> tuple[str, str]:
    """Return a token's probability under the original and under the efficient model, as text."""
    return percent(probabilities["original"]), percent(probabilities["efficient"])


def _cloud(tokens: pd.DataFrame, large: float) -> Cloud:
    """Return the cloud of words. tokens: those whose D_t is at least `large` nats."""
    words = _heaviest_words(tokens, _IN_CLOUD)
    placed, height = lay_out(words["sum"].to_dict())
    return Cloud(
        name="words",
        title="Where D_t is large: what the original says",
        words=[
            replace(
                word,
                meaning=f"{word.text}: sum of D_t = {words.at[word.text, 'sum']:.3g} at "
                f"{words.at[word.text, 'size']:,} places",
            )
            for word in placed
        ],
        height=height,
        note=f"n = {len(tokens):,} tokens with D_t from {large:.3g} nats",
    )


def _heaviest_words(tokens: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return sum and number of the D_t of the words with the largest sums, falling."""
    return tokens.groupby("word")["kl"].agg(["sum", "size"]).nlargest(most, "sum")


def _by_word(tokens: pd.DataFrame, size: str) -> Bars:
    """Return the words with the largest sums of D_t."""
    return Bars(
        name="divergence_by_token",
        title="Sum of D_t by token (how often)",
        x="sum of D_t (nats); in brackets: how often",
        rows=[
            Bar(label=word, value=kl_sum, text=f"{kl_sum:.2g} ({count:,})", n=size)
            for word, kl_sum, count in _heaviest_words(tokens, _SHOWN).itertuples()
        ],
    )


def _along_response(tokens: pd.DataFrame, remark: str) -> Chart:
    """Chart the mean D_t by a token's place in its response (0: start, 1: end)."""
    means = tokens.groupby("share")["kl"].agg(["mean", "size"])
    series = []
    if len(means):
        points = list(means["mean"].items())
        series = [
            Series(
                label="",
                style_index=1,
                points=points,
                n=f"{count_of(means['size'])} tokens in each of {len(points)} parts",
            )
        ]
    return Chart(
        name="divergence_along",
        title="Mean D_t along a response",
        x="share before the token",
        y="mean D_t (nats)",
        series=series,
        from_zero=True,
        remark=remark,
    )


def _shown(token: str) -> str:
    """Return the token as the page writes it: without spaces around it, other blanks visible."""
    bare = token.strip(" ")
    if bare and bare.isprintable():
        return bare
    return repr(token)[1:-1].replace(" ", "␣")


def _shaded(response: _Response, full: float) -> Markup:
    """Return the response, each token shaded by its D_t. full: the D_t that has the full colour."""
    preferences = {}
    for alternative in response["alternatives"]:
        texts = [
            f"{preferred['token']!r} {100 * preferred['efficient']:.0f} %"
            for preferred in alternative["preferred"]
        ]
        preferences[alternative["position"]] = f"; efficient: {', '.join(texts)}"
    template = Markup('<i class="k{}" title="D_t = {:.4g}{}">{}</i>')
    tokens = []
    for position, (token, kl) in enumerate(
        zip(response["tokens"], response["kl"], strict=True)
    ):
        shade = round(_SHADES * min(1.0, kl / full) ** 0.5)
        tokens.append(template.format(shade, kl, preferences.get(position, ""), token))
    return Markup(
        "<figure><figcaption>{problem_id}, sample {sample_index}: {outcome}</figcaption>"
        "<p>{problem} (answer: {gold})</p><pre>{shaded}</pre></figure>"
    ).format(**response, shaded=Markup("").join(tokens))
