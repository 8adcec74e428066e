"""Tables of docs/paper.md, in Markdown."""

from collections.abc import Iterable, Sequence

from megatron_opsft.study.claims import judge
from megatron_opsft.study.study_file import Study
from megatron_opsft.study.table import PHASES
from paper.rows import Line, Rows

# Overall accuracy, Pass@N and CR in %, and Eff, of the paper's main table: 1.5B, 7B.
PAPER = {
    "CoT": ("59.0 / 73.5 / 100.0 / 0.58", "73.3 / 84.6 / 100.0 / 0.89"),
    "CoD": ("58.3 / 71.7 / 93.6 / 0.61", "72.6 / 84.0 / 87.5 / 1.01"),
    "DEER": ("57.1 / 71.4 / 73.5 / 0.76", "72.4 / 84.6 / 76.2 / 1.16"),
    "CRST": ("55.6 / 71.7 / 77.5 / 0.70", "71.6 / 82.6 / 98.7 / 0.89"),
    "TokenSkip": ("28.7 / 28.7 / 190.4 / 0.15", "55.6 / 55.6 / 156.6 / 0.43"),
    "StepEntropy": ("40.8 / 59.8 / 86.6 / 0.46", "46.0 / 60.6 / 114.0 / 0.49"),
    "ThinkPrune": ("56.8 / 71.8 / 27.6 / 2.02", "69.7 / 79.8 / 51.1 / 1.67"),
    "O1-Pruner": ("57.2 / 72.0 / 47.0 / 1.19", "72.8 / 86.1 / 87.4 / 1.02"),
    "L1-Exact": ("57.8 / 69.6 / 22.3 / 2.55 (L1)", "67.3 / 82.5 / 28.7 / 2.86 (L1)"),
    "ER-RL": ("58.3 / 72.3 / 57.1 / 1.00", "71.7 / 84.4 / 66.7 / 1.31"),
    "LASER": ("59.8 / 74.8 / 48.2 / 1.22", "72.8 / 84.2 / 44.6 / 1.99"),
    "On-policy SFT": ("59.9 / 73.6 / 21.5 / 2.74", "72.8 / 85.7 / 29.9 / 2.97"),
}


def tables(rows: Rows, study: Study) -> dict[str, str]:
    """Name of a block of the page -> its text."""
    return {
        "claims": _claims(rows, study),
        "methods": _methods(rows),
        "costs": _costs(rows.lines("against_grpo")),
        "control": _ablation(rows.lines("length_control")),
        "ablations": "\n\n".join(
            _ablation(rows.lines(section))
            for section in (
                "temperature",
                "length_limit",
                "aggregation",
                "off_policy",
                "derivation",
            )
        ),
    }


def _claims(rows: Rows, study: Study) -> str:
    lines = []
    for name, section in study.sections.items():
        for claim in section.claims:
            found = judge(claim, rows.of(name))
            verdict = "-" if found.holds is None else "yes" if found.holds else "**no**"
            lines.append((claim.what, claim.paper, found.found, verdict, f"`{name}`"))
    head = ("claim", "paper", "tiny reasoner", "same direction", "`--section`")
    return _table(head, lines)


def _methods(rows: Rows) -> str:
    head = (
        "method", "paper, 1.5B", "paper, 7B", "Acc", "P@N", "Tok", "CR", "Eff", "NormStd", "seeds",
    )  # fmt: skip
    return _table(head, [_method(line) for line in rows.lines("methods")])


def _method(line: Line) -> tuple[str, ...]:
    small, large = PAPER.get(line.name, ("", ""))
    first = line.first
    return (
        line.name,
        small,
        large,
        _over_seeds(line, "accuracy", 100, 1) + _interval(first["accuracy_interval"], 100),
        f"{100 * line.mean('pass_at_n'):.1f}",
        _over_seeds(line, "tokens", 1, 1) + _interval(first["tokens_interval"], 1),
        f"{100 * line.mean('compression_ratio'):.1f}",
        f"{line.mean('efficiency'):.2f}",
        f"{line.mean('norm_std'):.3f}",
        str(len(line.rows)),
    )


def _costs(lines: Sequence[Line]) -> str:
    head = (
        "run", *(phase.replace("_", " ") for phase in PHASES), "step", "trained tokens",
        "peak MiB", "converged at", "after",
    )  # fmt: skip
    return _table(head, [_cost(line) for line in lines])


def _cost(line: Line) -> tuple[str, ...]:
    training = line.first["training"]
    phases = [training["phases"].get(phase) for phase in PHASES]
    return (
        line.name,
        *("" if seconds is None else f"{seconds:.2f}" for seconds in phases),
        f"{line.step_seconds:.2f}",
        f"{training['tokens'] / training['steps']:.0f}",
        f"{training['peak_memory_bytes'] / 2**20:.0f}",
        f"step {training['converged_step']}",
        f"{training['converged_seconds']:.0f} s",
    )


def _ablation(lines: Sequence[Line]) -> str:
    head = ("run", "Acc", "P@N", "Tok", "CR", "NormStd")
    return _table(
        head,
        [
            (
                line.name,
                f"{100 * line.mean('accuracy'):.1f}"
                + _interval(line.first["accuracy_interval"], 100),
                f"{100 * line.mean('pass_at_n'):.1f}",
                f"{line.mean('tokens'):.1f}" + _interval(line.first["tokens_interval"], 1),
                f"{100 * line.mean('compression_ratio'):.1f}",
                f"{line.mean('norm_std'):.3f}" + _interval(line.first["norm_std_interval"], 1, 3),
            )
            for line in lines
        ],
    )


def _over_seeds(line: Line, key: str, scale: float, digits: int) -> str:
    text = f"{scale * line.mean(key):.{digits}f}"
    return text if len(line.rows) == 1 else f"{text} ± {scale * line.deviation(key):.{digits}f}"


def _interval(ends: Sequence[float] | None, scale: float, digits: int = 1) -> str:
    return f" [{', '.join(f'{scale * end:.{digits}f}' for end in ends)}]" if ends else ""


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))
