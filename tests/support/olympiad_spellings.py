"""More rules like those of `answer_spellings`: what olympiad answers hold beside plain numbers, and
how a response denies its answer or takes it back.
"""

import re
from fractions import Fraction
from random import Random

from answer_spellings import (
    BASED,
    INTEGER,
    LIST,
    TUPLE,
    Rule,
    as_tex,
    clean,
    in_response,
    members,
    on,
    on_text,
    on_value,
    power_of_ten,
    replaced,
)

_VULGAR = {Fraction(1, 2): "½", Fraction(1, 3): "⅓", Fraction(3, 4): "¾", Fraction(5, 8): "⅝"}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_NAMES_OF_VALUES = (r"f''(2)", r"\operatorname{Var}(X)", r"P(A \mid B)", r"E[X]")
_POSITIVE = re.compile(r"[1-9]\d*")
_NEGATIVE = re.compile(r"-(\d+)")
_RATE = re.compile(r"(\d+) \\text\{ (\w+)/(\w+)\}(\^2)?")
_SET = re.compile(r"\\\{(.*)\\\}")
_EQUATIONS = re.compile(r"[a-z]=-?\d+(?:, [a-z]=-?\d+)+")
_FUNCTION = re.compile(r"([fg])\(x\)=([^,=\\]*x[^,=\\]*)")
_SEQUENCE = re.compile(r"(a_n=.*n.*)")
_BOUND = re.compile(r"x ?(<|>|\\le|\\ge) ?(-?\d+)")
_BOUNDS = re.compile(r"-(\d+)<x<(\d+)")
_HOURS = re.compile(r"(\d+) \\text\{ hours \}(\d+)\\text\{ minutes\}")
_EQUATION = re.compile(r"y=([^=,]*x[^=,]*)")
_LETTER = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_OTHER_RELATION = {"<": r"\le", r"\le": "<", ">": r"\ge", r"\ge": ">"}


def _repeating(value: Fraction, _: Random) -> str | None:
    """The decimal of a fraction whose digits repeat at once: 5/11 = 0.(45)."""
    for length in (1, 2, 6):
        period = abs(value) * (10**length - 1)
        if period.denominator == 1 and 0 < abs(value) < 1:
            sign = "-" if value < 0 else ""
            return rf"{sign}0.\overline{{{period.numerator:0{length}d}}}"
    return None


def _as_program(gold: str, _: Random) -> str | None:
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r" sqrt(\1)", gold)
    text = re.sub(r"\^(?:\{(\w)\}|(\w)(?!\w))", r"**\1\2", text)
    return text if not re.search(r"[\\,^]", text) else None


def _named(match: re.Match[str], random: Random) -> str:
    return f"{random.choice(_NAMES_OF_VALUES)} = {match[0]}"


def _doubled_bound(match: re.Match[str], _: Random) -> str:
    return f"2x {match[1]} {2 * int(match[2])}"


def _cases(match: re.Match[str], _: Random) -> str:
    equations = match[0].replace(", ", r" \\ ")
    return rf"\begin{{cases}}{equations}\end{{cases}}"


def _hours(match: re.Match[str], _: Random) -> str:
    return rf"{int(match[1]) * 60 + int(match[2])} \text{{ minutes}}"


def _degrees_in_a_sine(gold: str, _: Random) -> str:
    angles = {r"\frac{\pi}{6}": "30", r"\frac{\pi}{4}": "45", r"\frac{\pi}{3}": "60"}
    for radians, degrees in angles.items():
        gold = re.sub(
            rf"(\\(?:sin|cos)\(x[+-]){re.escape(radians)}", rf"\g<1>{degrees}^\\circ", gold
        )
    return gold


OLYMPIAD_EQUIVALENT: dict[str, Rule] = {
    "superscripts": replaced(
        r"\^(?:\{(\d+)\}|(\d)(?![\d/]))", lambda m: (m[1] or m[2]).translate(_SUPERSCRIPTS)
    ),
    "½": on_value(lambda value, _: _VULGAR.get(value)),
    "colour": on_text(
        lambda gold, _: None
        if re.search(r"OR|^\\\{|[.,]$|mathrm", gold)
        else rf"\textcolor{{blue}}{{{gold}}}"
    ),
    "fraction without braces": replaced(r"\\frac\{(\d|\\pi)\}\{(\d)\}", r"\\frac\1\2"),
    "binomial without braces": replaced(r"\\binom\{(\d)\}\{(\d)\}", r"\\binom\1\2"),
    "\\choose": replaced(r"\\binom\{(\w+)\}\{(\w+)\}", r"{\1 \\choose \2}"),
    "number of choices": replaced(r"\\binom\{(\d+)\}\{(\d+)\}", r" C(\1,\2)"),
    "\\mathbb R": replaced(r"\\mathbb\{(\w)\}", r"\\mathbb \1"),
    "all real numbers": replaced(r"^\\mathbb\{R\}$", r"\\text{all real numbers}"),
    "cases": on(_EQUATIONS, _cases),
    "option with its text": on(re.compile("[A-E]"), lambda m, _: rf"\text{{{m[0]}. The third}}"),
    "several options": on(re.compile("[A-E](?:, [A-E])+"), lambda m, _: m[0].replace(", ", "")),
    "currency in \\text": on(_POSITIVE, lambda m, _: rf"\text{{\$}}{m[0]}"),
    "unit in one \\mathrm": on(
        _RATE,
        lambda m, _: rf"{m[1]}\,\mathrm{{{m[2]}\cdot {m[3]}^{{{-2 if m[4] else -1}}}}}",
    ),
    "fraction of units": on(
        _RATE, lambda m, _: rf"{m[1]}\,\frac{{\mathrm{{{m[2]}}}}}{{\mathrm{{{m[3]}}}{m[4] or ''}}}"
    ),
    "unit in parentheses": on(_POSITIVE, lambda m, _: f"{m[0]} (apples)"),
    "unit in parentheses in \\text": on(_POSITIVE, lambda m, _: rf"{m[0]} \text{{ (apples)}}"),
    "micro": on(re.compile(r"(\d+) \\text\{ mum\}"), lambda m, _: rf"{m[1]}\,\mu\mathrm{{m}}"),
    "ohm": on(_POSITIVE, lambda m, _: rf"{m[0]}\,\Omega"),
    "line end in the box": on_text(lambda gold, _: gold + r" \\"),
    "repeating decimal": on_value(_repeating),
    "0x": on(BASED, lambda m, _: f"0x{m[1]}" if m[2] == "16" else None),
    "minus in words": on(_NEGATIVE, lambda m, _: rf"\text{{minus }} {m[1]}"),
    "\\lbrace": on(_SET, lambda m, _: rf"\lbrace {m[1]} \rbrace"),
    "\\langle": on(TUPLE, lambda m, _: rf"\langle {m[1]} \rangle"),
    "ratio in words": on(re.compile(r"(\d+):(\d+)"), lambda m, _: f"{m[1]} to {m[2]}"),
    "square of a factorial": replaced(r"\((\w+!)\)\^", r"\1^"),
    "as a program writes it": on_text(_as_program),
    "pi in words": replaced(r"\\pi(?![a-z])", "pi"),
    "infinity in words": replaced(r"\\infty", r"\\text{infinity}"),
    "extreme as a name": on(INTEGER, lambda m, _: rf"n_{{\max}} = {m[0]}"),
    "name in front": on(INTEGER, _named),
    "probability in front": on(INTEGER, lambda m, _: rf"\Pr(A) = {m[0]}"),
    "abs": replaced(r"^\|([^|]*)\|", r"abs(\1)"),
    "function without a backslash": replaced(r"\\(sin|cos|tan|ln|log)(?![a-z])", r"\1"),
    "braces of a maximum": replaced(r"\\(max|min)\(([^()]*)\)", r"\\\1\\left\\{\2\\right\\}"),
    "\\lg": replaced(r"\\log_\{10\}", r"\\lg"),
    "\\log_2 3": replaced(r"^\\log_\{(\d)\} (?=\d)", r"x = \\log_\1 "),
    "degrees in a sine": on_text(_degrees_in_a_sine),
    "fahrenheit": replaced(r"\^\\circ \\text\{F\}", r" \\text{ fahrenheit}"),
    "per cent in words": replaced(r"\\%", r"\\text{ percent}"),
    "millions": on_value(
        lambda value, _: (
            None if value == 0 or value % 10**6 else rf"{value // 10**6} \text{{ million}}"
        )
    ),
    "about": on_value(lambda value, _: rf"\approx {as_tex(value)}"),
    "for all x": on(_FUNCTION, lambda m, _: rf"{m[0]} \text{{ for all }} x"),
    "for all x of a set": on(_FUNCTION, lambda m, _: rf"{m[0]},\ \forall x \in \mathbb{{R}}"),
    "set in parentheses": on(_FUNCTION, lambda m, _: rf"{m[0]}\quad (x\in\mathbb{{R}})"),
    "bound behind a comma": on(_SEQUENCE, lambda m, _: rf"{m[0]},\ n \ge 1"),
    "bound as a program writes it": on(_SEQUENCE, lambda m, _: rf"{m[0]}, n >= 1"),
    "scientific with x": power_of_ten("{} x 10^{{{}}}"),
    "sign for inches": on(re.compile(r"(\d+) \\text\{ inches\}"), lambda m, _: m[1] + "''"),
    "sign for feet": on(re.compile(r"(\d+) \\text\{ feet\}"), lambda m, _: m[1] + "'"),
    "only": on(INTEGER, lambda m, _: rf"{m[0]} \text{{ only}}"),
    "condition in parentheses": on(INTEGER, lambda m, _: rf"{m[0]} \text{{ (when }} x = 3)"),
    "another argument": on(_FUNCTION, lambda m, _: re.sub(r"x(?!p)", "t", m[0])),
    "relation turned": on(_BOUND, lambda m, _: f"{m[2]} {_TURNED[m[1]]} x"),
    "relation times two": on(_BOUND, _doubled_bound),
    "bounds as an absolute value": on(
        _BOUNDS, lambda m, _: f"|x|<{m[1]}" if m[1] == m[2] else None
    ),
    "minutes": on(_HOURS, _hours),
    "equation turned": on(_EQUATION, lambda m, _: f"{m[1]}=y"),
    "list with equal sign": on(LIST, lambda m, _: f"x = {m[0]}"),
    "another language": in_response("Wir rechnen. Die Antwort ist $GOLD$."),
    "box and statement": in_response(r"\boxed{GOLD}. So the answer is $GOLD$."),
    "statement after another box": in_response(r"\boxed{8642}? No, the answer is $GOLD$."),
}  # fmt: skip


def _other_case(gold: str, random: Random) -> str | None:
    """The gold with one letter of an expression in the other case; i alone is a complex number, and
    a time or a numeral has no letters.
    """
    if re.search(r":|_\{?16|\\mathbf|=.*=", gold):
        return None
    # Letters of words may have any case.
    found = [match for match in _LETTER.finditer(gold) if _stands_alone(match)]
    if (
        not found
        or not re.search(r"[\d+^=/-]", gold)
        or {match[0] for match in found} <= {"i", "e"}
    ):
        return None
    match = random.choice(found)
    return gold[: match.start()] + match[0].swapcase() + gold[match.end() :]


def _stands_alone(match: re.Match[str]) -> bool:
    before, behind = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return len(match[0]) == 1 and not before.isalpha() and not behind.isalpha()


def _other_letter(gold: str, random: Random) -> str | None:
    found = [match for match in _LETTER.finditer(gold) if len(match[0]) == 1 and match[0] != "C"]
    if not found or not re.search(r"[\d+^/-]", gold) or re.search(r"=|\\equiv", gold):
        return None
    match = random.choice(found)
    return gold[: match.start()] + "w" + gold[match.end() :]


def _one_sign(gold: str, _: Random) -> str | None:
    if "(-1)^" in gold:  # n - 1 is there as good as n + 1
        return None
    return re.sub(r"(?<=[\w}]) ?\+ ?(?=[\w\\])", "-", gold, count=1) if r"\pm" not in gold else None


def _one_member(match: re.Match[str], random: Random) -> str:
    parts = members(match[0])
    index = random.randrange(len(parts))
    parts[index] = str(int(parts[index]) + 97)
    return ", ".join(parts)


def _is_fraction(value: Fraction) -> bool:
    """Whether no decimal says it."""
    return value.denominator % 3 == 0 or value.denominator % 7 == 0 or value.denominator % 11 == 0


def _number_of_digits(gold: str, _: Random) -> str | None:
    text = clean(gold)
    return f"The answer is a {text}-digit number." if _POSITIVE.fullmatch(text) else None


OLYMPIAD_INEQUIVALENT: dict[str, Rule] = {
    "a letter's case": on_text(_other_case),
    "another letter": on_text(_other_letter),
    "one sign of a formula": on_text(_one_sign),
    "one member of a list": on(LIST, _one_member),
    "relation the other way": on(_BOUND, lambda m, _: f"x {_TURNED[m[1]]} {m[2]}"),
    "relation with another bound": on(_BOUND, lambda m, _: f"x {_OTHER_RELATION[m[1]]} {m[2]}"),
    "relation for another letter": on(_BOUND, lambda m, _: f"y {m[1]} {m[2]}"),
    "another power of a letter": replaced(r"(?<=[a-z])\^\{?2\}?", "^5"),
    "another power of a measure": on(_RATE, lambda m, _: rf"{m[1]} \text{{ {m[2]}/{m[3]}}}^3"),
    "another function": replaced(r"\\sin(?![a-z])", r"\\cos"),
    "argument left as it was": on(
        _FUNCTION, lambda m, _: f"{m[1]}(t)={m[2]}" if "x" in m[2] else None
    ),
    "chain that does not hold": on(INTEGER, lambda m, _: f"{int(m[0]) + 1} = {m[0]}"),
    "two cases": on_value(
        lambda value, _: rf"{as_tex(value)} \text{{ if }} x>0, 5555 \text{{ otherwise}}"
    ),
    "percent sign added to a fraction": on_value(
        lambda value, _: rf"{as_tex(value)}\%" if abs(value) < 1 and _is_fraction(value) else None
    ),
    "thousands": on(_POSITIVE, lambda m, _: rf"{m[0]}\text{{k}}"),
    "gross": on(_POSITIVE, lambda m, _: rf"{m[0]} \text{{ gross}}"),
    "other minutes": on(_HOURS, lambda m, _: rf"{m[1]} \text{{ hours }}59\text{{ minutes}}"),
    "a tiny difference of a root": on(
        re.compile(r"\\sqrt\{\d+\}"), lambda m, _: rf"{m[0]} + 10^{{-40}}"
    ),
    "denied in front": in_response(r"The answer is not \boxed{GOLD}."),
    "denied behind": in_response(r"\boxed{GOLD}? No."),
    "taken back": in_response(r"\boxed{GOLD}. Wait, I made an error. The correct answer is 97531."),
    "in mid-thought": in_response("The answer should be $GOLD$. Maybe, let me see: 5? 5?"),
    "half of it": in_response("The answer is half of $GOLD$."),
    "anything else": in_response("The answer is anything except $GOLD$."),
    "a number of digits": _number_of_digits,
}  # fmt: skip
