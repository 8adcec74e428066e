"""What the paper says, each with what a study's table says of it: figures and whether the direction
is the same. Nothing is rounded into agreement: each condition stands beside its claim.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paper.rows import Line, NotMade, Rows

OURS, RIVAL = "On-policy SFT", "ThinkPrune"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """section: of the study, whose runs decide; found: what the table says, and whether it has the
    paper's direction. Errors of found: `NotMade`.
    """

    section: str
    what: str
    paper: str
    found: Callable[[Rows], tuple[str, bool]]


def _accuracy(line: Line) -> str:
    return f"{100 * line.mean('accuracy'):.1f} %"


def _tokens(line: Line) -> str:
    return f"{line.mean('tokens'):.1f}"


def _both(line: Line) -> str:
    return f"{line.name}: {_accuracy(line)}, {_tokens(line)} tokens"


def _shorter(rows: Rows) -> tuple[str, bool]:
    base, ours = rows.method("CoT"), rows.method(OURS)
    kept = ours.mean("accuracy") >= base.mean("accuracy") - 0.005
    return (
        f"{_tokens(base)} to {_tokens(ours)} tokens, {_accuracy(base)} to {_accuracy(ours)}",
        kept and ours.mean("tokens") < 0.5 * base.mean("tokens"),
    )


def _best_efficiency(rows: Rows) -> tuple[str, bool]:
    ranked = sorted(rows.lines("methods"), key=lambda line: -line.mean("efficiency"))
    place = [line.name for line in ranked].index(OURS) + 1
    best = ", ".join(f"{line.name} {line.mean('efficiency'):.2f}" for line in ranked[:3])
    return f"place {place} of {len(ranked)}; first: {best}", place == 1


def _ratio(name: str) -> Callable[[Rows], tuple[str, bool]]:
    """Of tokens to the base model's, larger than ours."""

    def found(rows: Rows) -> tuple[str, bool]:
        line, ours = rows.method(name), rows.method(OURS)
        ratio = line.mean("compression_ratio")
        text = f"CR {100 * ratio:.1f} %, {_accuracy(line)}"
        return text, ratio > ours.mean("compression_ratio")

    return found


def _beaten(name: str) -> Callable[[Rows], tuple[str, bool]]:
    """More tokens than ours and a lower accuracy."""

    def found(rows: Rows) -> tuple[str, bool]:
        line, ours = rows.method(name), rows.method(OURS)
        longer = line.mean("tokens") > ours.mean("tokens")
        text = f"{_both(line)}; {_both(ours)}"
        return text, longer and line.mean("accuracy") < ours.mean("accuracy")

    return found


def _step_ratio(rows: Rows) -> tuple[str, bool]:
    ratios = {}
    for group in (4, 8, 16):
        ours, rival = (rows.line("against_grpo", f"{name}, G = {group}") for name in (OURS, RIVAL))
        ratios[group] = ours.step_seconds / rival.step_seconds
    shown = ", ".join(f"{ratio:.2f} (G = {group})" for group, ratio in ratios.items())
    return f"{shown} of {RIVAL}'s seconds", all(ratio < 0.9 for ratio in ratios.values())


def _memory_ratio(rows: Rows) -> tuple[str, bool]:
    ours, rival = (rows.line("against_grpo", f"{name}, G = 8") for name in (OURS, RIVAL))
    mib = [line.mean("training", "peak_memory_bytes") / 2**20 for line in (ours, rival)]
    return f"{mib[0]:.0f} against {mib[1]:.0f} MiB, libraries included", mib[0] < 0.9 * mib[1]


def _converged(rows: Rows) -> tuple[str, bool]:
    ours, rival = rows.method(OURS), rows.method(RIVAL)
    steps = [line.mean("training", "converged_step") for line in (ours, rival)]
    seconds = [line.mean("training", "converged_seconds") for line in (ours, rival)]
    share = seconds[0] / seconds[1] if seconds[1] else float("inf")
    text = f"step {steps[0]:.0f} against {steps[1]:.0f}; {100 * share:.0f} % of the seconds"
    return text, steps[0] < steps[1] and share < 0.9


def _control(rows: Rows) -> tuple[str, bool]:
    ours, rival = (rows.line("length_control", name) for name in (OURS, RIVAL))
    values = [line.mean("norm_std") for line in (ours, rival)]
    return f"NormStd {values[0]:.3f} against {values[1]:.3f}", values[0] < values[1]


def _frontier(rows: Rows) -> tuple[str, bool]:
    """At every budget that shortens anything, nobody of the section is more accurate."""
    curves = {
        line.name: {point["budget"]: point["accuracy"] for point in line.first["budgets"]}
        for line in rows.lines("length_control")
    }
    if OURS not in curves:
        raise NotMade(OURS)
    best = [b for b in curves[OURS] if all(curves[OURS][b] >= c[b] for c in curves.values())]
    return f"best or equal at {len(best)} of {len(curves[OURS])} budgets", len(best) == len(
        curves[OURS]
    )


def _off_policy(rows: Rows) -> tuple[str, bool]:
    ours, other = (rows.line("off_policy", n) for n in ("on-policy", "off-policy, 4 rounds"))
    longer = other.mean("tokens") > ours.mean("tokens")
    worse = longer and other.mean("accuracy") < ours.mean("accuracy")
    return f"{_both(ours)}; {_both(other)}", worse


def _cold(rows: Rows) -> tuple[str, bool]:
    lines = [rows.line("temperature", f"T = {t}") for t in ("0.3", "0.6", "1")]
    *cold, one = lines
    collapsed = all(
        line.mean("tokens") < one.mean("tokens")
        and line.mean("accuracy") < one.mean("accuracy") - 0.01
        for line in cold
    )
    return "; ".join(map(_both, lines)), collapsed


def _hot(rows: Rows) -> tuple[str, bool]:
    lines = [rows.line("temperature", f"T = {t}") for t in ("1", "1.2", "1.5")]
    one, *hot = lines
    worse = all(line.mean("accuracy") < one.mean("accuracy") - 0.01 for line in hot)
    return "; ".join(map(_both, lines)), worse


def _groups(rows: Rows) -> tuple[str, bool]:
    lines = [rows.line("against_grpo", f"{OURS}, G = {group}") for group in (4, 8, 16)]
    lengths = [line.mean("tokens") for line in lines]
    falls = lengths[0] > lengths[1] > lengths[2]
    return ", ".join(f"{t:.1f}" for t in lengths) + " tokens at G = 4, 8, 16", falls


def _length_bias(rows: Rows) -> tuple[str, bool]:
    ours = rows.line("aggregation", "M, the longest accepted")
    other = rows.line("aggregation", "each response's length")
    collapsed = other.mean("accuracy") < ours.mean("accuracy") - 0.05
    return f"{_both(ours)}; {_both(other)}", collapsed


def _limits(rows: Rows) -> tuple[str, bool]:
    lines = [rows.line("length_limit", f"L = {limit}") for limit in (48, 64, 96)]
    tokens = [line.mean("tokens") for line in lines]
    falls = tokens[0] < tokens[2] and lines[0].mean("accuracy") <= lines[2].mean("accuracy")
    return "; ".join(map(_both, lines)), falls


def _same_method(rows: Rows) -> tuple[str, bool]:
    last, ours = (rows.line("derivation", name) for name in ("1 / (N M)", OURS))
    same = all(last.mean(key) == ours.mean(key) for key in ("accuracy", "tokens", "norm_std"))
    return f"{_both(last)}; {_both(ours)}", same


CLAIMS = (
    Claim(
        section="methods",
        what="Much shorter at the same accuracy",
        paper="10,178 to 2,186 tokens, 59.0 to 59.9 % (1.5B)",
        found=_shorter,
    ),
    Claim(
        section="methods",
        what="Highest Eff of all methods",
        paper="2.74; L1 2.55, ThinkPrune 2.02",
        found=_best_efficiency,
    ),
    Claim(
        section="methods",
        what="Shorter and more accurate than ThinkPrune",
        paper="2,806 tokens, 56.8 %; 2,186 tokens, 59.9 %",
        found=_beaten(RIVAL),
    ),
    *(
        Claim(section="methods", what=f"{name} shortens less", paper=paper, found=_ratio(name))
        for name, paper in (
            ("CoD", "CR 93.6 %, 58.3 %"),
            ("DEER", "CR 73.5 %, 57.1 %"),
            ("CRST", "CR 77.5 %, 55.6 %"),
            ("TokenSkip", "CR 190.4 %, 28.7 %"),
            ("StepEntropy", "CR 86.6 %, 40.8 %"),
        )
    ),
    Claim(
        section="against_grpo",
        what="A step costs less than ThinkPrune's",
        paper="about half of the seconds at every G",
        found=_step_ratio,
    ),
    Claim(
        section="against_grpo",
        what="Less peak memory than ThinkPrune",
        paper="about half",
        found=_memory_ratio,
    ),
    Claim(
        section="methods",
        what="Converges sooner than ThinkPrune",
        paper="step 300 against 500; about 30 % of the seconds",
        found=_converged,
    ),
    Claim(
        section="length_control",
        what="Steadier lengths than ThinkPrune",
        paper="lower NormStd at every budget (figure, AIME24)",
        found=_control,
    ),
    Claim(
        section="length_control",
        what="On the Pareto front of the budget curves",
        paper="always (figure, AIME24 and MATH-500)",
        found=_frontier,
    ),
    Claim(
        section="off_policy",
        what="Off-policy rounds shorten less and cost accuracy",
        paper="much worse (figure, 7B, 7 rounds of 50 steps)",
        found=_off_policy,
    ),
    Claim(
        section="temperature",
        what="T below 1 collapses",
        paper="0.3 and 0.6: far too short, accuracy falls",
        found=_cold,
    ),
    Claim(
        section="temperature",
        what="T above 1 diverges",
        paper="1.2 and 1.5: the loss only rises",
        found=_hot,
    ),
    Claim(
        section="against_grpo",
        what="More responses, shorter answers",
        paper="shorter with every G",
        found=_groups,
    ),
    Claim(
        section="aggregation",
        what="Dividing by each response's length collapses",
        paper="length and accuracy go to 0 after about 250 steps",
        found=_length_bias,
    ),
    Claim(
        section="length_limit",
        what="A smaller L is shorter and a little worse",
        paper="3,000, 3,500, 4,000 tokens",
        found=_limits,
    ),
    Claim(
        section="derivation",
        what="GRPO, changed step by step, becomes on-policy SFT",
        paper="the derivation",
        found=_same_method,
    ),
)
