"""Which model the CR of each row refers to, by its role: models may share a label."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.results import Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The model that is 100 % of a CR.

    label: as printed. row: its place, None where it has none.
    """

    label: str
    row: int | None


def row_labels(results: Sequence[Results]) -> list[str]:
    """The models' names, each once: the second one of a name gets (2), and so on."""
    labels: list[str] = []
    for result in results:
        label, number = result.model, 1
        while label in labels:
            number += 1
            label = f"{result.model} ({number})"
        labels.append(label)
    return labels


def own_references(results: Sequence[Results]) -> list[Reference | None]:
    """The baseline that each result was made with."""
    labels = row_labels(results)
    found: list[Reference | None] = []
    for place, result in enumerate(results):
        name, row = result.baseline, _row_of_baseline(place, results)
        if name is None:
            found.append(None)
        elif row is not None:
            found.append(Reference(label=labels[row], row=row))
        else:
            label = f"{name} (not a row)" if name in labels else name
            found.append(Reference(label=label, row=None))
    return found


def chosen_references(results: Sequence[Results], baseline: str | None) -> list[Reference | None]:
    """What each row's CR refers to. baseline: the label of one model for all rows.

    By default a row keeps the baseline of its result; rows without one take the only baseline that
    others have, or the first row. `UserError` for a label that is not there.
    """
    labels = row_labels(results)
    own = own_references(results)
    known = list(dict.fromkeys(reference for reference in own if reference is not None))
    if baseline is not None:
        rows = [Reference(label=label, row=place) for place, label in enumerate(labels)]
        for candidate in (*rows, *known):
            if candidate.label == baseline:
                return [candidate] * len(results)
        raise UserError(f"baseline {baseline}: there are {', '.join(labels)}")
    chosen: list[Reference | None] = []
    for place, reference in enumerate(own):
        if reference is None and any(other.row == place for other in known):
            reference = Reference(label=labels[place], row=place)
        elif reference is None and known:
            reference = known[0] if len(known) == 1 else None
        elif reference is None and len(results) > 1:
            reference = Reference(label=labels[0], row=0)
        chosen.append(reference)
    return chosen


def _row_of_baseline(place: int, results: Sequence[Results]) -> int | None:
    """The row of the baseline's name whose tokens give the stored CR: another evaluation of the
    same name is not what the result was compared with. Never the result itself.
    """
    result = results[place]
    rows = [n for n, other in enumerate(results) if n != place and other.model == result.baseline]
    return next((row for row in rows if _agree(result, results[row])), None)


def _agree(result: Results, base: Results) -> bool:
    """Whether the stored CR of every benchmark that both have is the one to the base's tokens."""
    shared = [name for name in result.benchmarks if name in base.benchmarks]
    return bool(shared) and all(
        math.isclose(
            result.benchmarks[name].metrics["mean_tokens"].value,
            result.benchmarks[name].metrics["compression_ratio"].value
            * base.benchmarks[name].metrics["mean_tokens"].value,
            rel_tol=1e-6,
        )
        for name in shared
        if "compression_ratio" in result.benchmarks[name].metrics
    )
