"""Rules that write a gold answer in another way: equivalent spellings, and answers that are wrong.

Each rule takes a gold answer and a random generator, and gives the text of a response, or None
where it does not apply. `EQUIVALENT` keeps the answer, `INEQUIVALENT` changes it.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

Rule = Callable[[str, Random], str | None]

INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+\.\d+")
_FRACTION = re.compile(r"^(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}$")
BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)\s*(?:\\text\{)?\s*([ap])\.?m\.?\s*\}?")
_RATIO = re.compile(r"(\d+)\s*:\s*(\d+)")
TUPLE = re.compile(r"\((-?[^(),]+(?:,-?[^(),]+)+)\)")
LIST = re.compile(r"(?!-?\d{1,3}(?:,\d{3})+$)-?\d+(?:,\s*-?\d+)+")
UNIT = re.compile(
    r"(-?[\d.]+)\s*\\(?:text|mbox|mathrm)\{\s*~?(cm|inches|feet|hours|km|degrees|dollars)\s*\}"
)
_WORD = re.compile(r"\\text\{([A-Za-z ]{2,})\}|([A-Z]?[a-z]{3,})")
_FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def boxed(answer: str) -> str:
    return f"So.\n</think>\n\nThe answer is $\\boxed{{{answer}}}$."


def clean(gold: str) -> str:
    """Without the marks of a formula, which do not belong in a box."""
    gold = gold.strip()
    for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if gold.startswith(opening) and gold.endswith(closing) and len(gold) > 2:
            gold = gold[len(opening) : -len(closing)].strip()
    return gold


def as_fraction(gold: str) -> Fraction | None:
    """The value of an integer, a decimal or a plain fraction."""
    plain = _FRACTION.sub(r"\1\2/\3", gold)
    return Fraction(plain) if re.fullmatch(r"-?\d+(?:\.\d+|/[1-9]\d*)?", plain) else None


def as_tex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _terminating(value: Fraction) -> str | None:
    """The decimal that says it exactly; None where there is none of few digits."""
    text = re.sub(r"(\.\d+?)0*$", r"\1", f"{float(value):.8f}")
    return text if Fraction(text) == value else None


def _may_be_rounded(value: Fraction) -> bool:
    """Whether it is a decimal of so many digits that the judge takes it for a rounded one."""
    text = _terminating(value) or str(float(value)) if value.denominator > 1 else ""
    return len(text.replace(".", "").strip("-0")) >= 6


def _rule(read: Callable[[str], Any], rewrite: Callable[[Any, Random], str | None]) -> Rule:
    """A box with what `rewrite` makes of what `read` finds in a gold; None where it finds nothing,
    or the answer stays as it is.
    """

    def rule(gold: str, random: Random) -> str | None:
        text = clean(gold)
        found = read(text)
        answer = None if found is None else rewrite(found, random)
        return None if answer in (None, text) else boxed(answer)

    return rule


def on(pattern: re.Pattern[str], rewrite: Callable[[re.Match[str], Random], str | None]) -> Rule:
    return _rule(pattern.fullmatch, rewrite)


on_value = partial(_rule, as_fraction)
on_text = partial(_rule, str)


def in_response(template: str) -> Rule:
    def rule(gold: str, random: Random) -> str | None:
        text = clean(gold)
        if "\n" in text or "$" in text or text.startswith(r"\text"):
            return None
        return template.replace("GOLD", text)

    return rule


def replaced(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Rule:
    return on_text(lambda gold, _: re.sub(pattern, replacement, gold))


def _grouped(separator: str) -> Rule:
    return on(
        re.compile(r"-?\d{5,}"), lambda match, _: f"{int(match[0]):,}".replace(",", separator)
    )


def _mixed(value: Fraction, _: Random) -> str | None:
    whole, rest = divmod(abs(value), 1)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}{as_tex(rest)}" if whole and rest else None


def power_of_ten(form: str) -> Rule:
    """form: of mantissa and power."""

    def rewrite(value: Fraction, _: Random) -> str | None:
        mantissa, _, power = f"{float(value):.12e}".partition("e")
        if not value or Fraction(mantissa) * Fraction(10) ** int(power) != value:
            return None
        return form.format(mantissa.rstrip("0").rstrip("."), int(power))

    return on_value(rewrite)


def members(gold: str) -> list[str]:
    return [part.strip() for part in gold.split(",")]


def _shuffled(match: re.Match[str], random: Random) -> str | None:
    parts = members(match[0])
    random.shuffle(parts)
    return ", ".join(parts[:-1]) + rf" \text{{ and }} {parts[-1]}"


_ROOT = r"\\sqrt\{(\d+)\}"
EQUIVALENT: dict[str, Rule] = {
    "box": lambda gold, _: boxed(clean(gold)),
    "box in a displayed formula": in_response("</think>\n\\[\n\\boxed{GOLD}\n\\]"),
    "fbox": in_response("So we get \\fbox{GOLD}."),
    "an earlier box": in_response("First \\boxed{12345678}. No: \\boxed{GOLD}"),
    "bold Answer: line": in_response("We add.\n\n**Answer:** $GOLD$."),
    "The answer is": in_response("We add. The answer is \\(GOLD\\)."),
    "The final answer is, after a box": in_response(
        "\\boxed{87654321}? No. The final answer is $GOLD$. I hope it is correct."
    ),
    "full stop in the box": on_text(lambda gold, _: gold + "."),
    "formula marks in the box": on_text(lambda gold, _: None if "$" in gold else f"${gold}$"),
    "\\displaystyle": on_text(lambda gold, _: r"\displaystyle " + gold),
    "\\dfrac": replaced(r"\\[dt]?frac", r"\\dfrac"),
    "thin spaces": replaced(r"(?<=[\d}])\s*([+=])\s*(?=[\d\\a-z])", r"\\,\1\\;"),
    "full-width digits": on_text(
        lambda gold, _: re.sub(r"\d", lambda m: m[0].translate(_FULL_WIDTH), gold)
    ),
    "Unicode minus": replaced("-", "−"),
    "√": replaced(_ROOT, r"√\1"),
    "degree sign": replaced(r"\^\{?\\circ\}?", "°"),
    "degree sign left out": on(re.compile(r"(\d+)\s*\^\{?\\circ\}?"), lambda m, _: m[1]),
    "degrees": on(re.compile(r"(\d+)\s*\^\{?\\circ\}?"), lambda m, _: m[1] + r" \text{ degrees}"),
    "groups 1,234": _grouped(","),
    "groups 1{,}234": _grouped("{,}"),
    "groups 1\\,234": _grouped(r"\,"),
    "groups 1 234": _grouped(" "),
    "whole number as a decimal": on(INTEGER, lambda m, _: m[0] + ".0"),
    "trailing zeros": on(_DECIMAL, lambda m, _: m[0] + "00"),
    "x =": on(INTEGER, lambda m, _: "x = " + m[0]),
    "a unit": on(INTEGER, lambda m, _: m[0] + r" \text{ apples}"),
    "a measure": on(INTEGER, lambda m, _: m[0] + r"\,\mathrm{cm}^2"),
    "a currency": on(re.compile(r"\d+"), lambda m, _: r"\$" + m[0]),
    "unit left out": on(UNIT, lambda m, _: m[1]),
    "percent sign added": on_text(
        lambda gold, _: gold + r"\%" if INTEGER.fullmatch(gold) or _DECIMAL.fullmatch(gold) else None
    ),
    "option letter": on_value(lambda value, random: rf"\textbf{{({random.choice('ABCDE')})}}\ {as_tex(value)}"),
    "a / b": on(_FRACTION, lambda m, _: f"{m[1]}{m[2]}/{m[3]}"),
    "fraction times two": on_value(
        lambda value, _: rf"\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"
    ),
    "mixed number": on_value(_mixed),
    "decimal": on_value(lambda value, _: _terminating(value)),
    "six digits of a fraction": on_value(
        lambda value, _: None if _terminating(value) or value == 0 else f"{float(value):.8g}"
        if 1e-3 < abs(value) < 1e7 else None
    ),
    "scientific": power_of_ten(r"{} \times 10^{{{}}}"),
    "fraction of a decimal": on(_DECIMAL, lambda m, _: as_tex(Fraction(m[0]))),
    "2.5e-05": power_of_ten("{}e{:+03d}"),
    "base in words": on(BASED, lambda m, _: rf"{m[1]} \text{{ (base {m[2]})}}"),
    "base in Unicode": on(BASED, lambda m, _: m[1] + m[2].translate(_SUBSCRIPT)),
    "time": on(_CLOCK, lambda m, _: rf"{m[1]}\!:\!{m[2]} \text{{ {m[3]}.m.}}"),
    "time in capitals": on(_CLOCK, lambda m, _: rf"{m[1]}:{m[2]}\,{m[3].upper()}M"),
    "ratio with spaces": on(_RATIO, lambda m, _: rf"{m[1]} \colon {m[2]}"),
    "tuple with spaces": on(TUPLE, lambda m, _: r"\left( " + r" ,\ ".join(members(m[1])) + r" \right)"),
    "list in another order": on(LIST, _shuffled),
    "list as a set": on(LIST, lambda m, _: rf"\{{{m[0]}\}}" if len(set(members(m[0]))) == len(members(m[0])) else None),
    "word without \\text": on(_WORD, lambda m, _: m[1] or m[2]),
    "word with \\text": on(_WORD, lambda m, _: rf"\mathrm{{{m[1] or m[2]}}}"),
    "word in capitals": on(_WORD, lambda m, _: rf"\textbf{{{(m[1] or m[2]).upper()}}}"),
}  # fmt: skip


def _tuple_swapped(match: re.Match[str], _: Random) -> str | None:
    parts = members(match[1])
    swapped = [parts[1], parts[0], *parts[2:]]
    return None if parts[0] == parts[1] else f"({', '.join(swapped)})"


def _without_member(match: re.Match[str], random: Random) -> str | None:
    parts = list(dict.fromkeys(members(match[0])))
    parts.pop(random.randrange(len(parts)))
    return ", ".join(parts) if parts else None


def _other_base(match: re.Match[str], _: Random) -> str | None:
    return f"{match[1]}_{{{int(match[2]) + 1}}}" if len(match[1].lstrip("0")) > 1 else None


_VALUE_CHANGES: dict[str, Callable[[Fraction, Random], str | None]] = {
    "sign": lambda value, _: as_tex(-value) if value else None,
    "one more": lambda value, _: as_tex(value + 1),
    "twice": lambda value, _: as_tex(2 * value) if value else None,
    "ten times": lambda value, _: as_tex(10 * value) if value else None,
    "reciprocal": lambda value, _: as_tex(1 / value) if value not in (0, 1, -1) else None,
    "a tiny difference, as a fraction": lambda value, _: (
        as_tex(value * Fraction(10**9 + 1, 10**9)) if value and not _may_be_rounded(value) else None
    ),
    "a tiny difference, as a decimal": lambda value, _: (
        f"{float(value) * (1 + 1e-5):.10g}" if 1e-3 < abs(value) < 1e4 and _terminating(value) else None
    ),
    "a tiny difference, as a power": lambda value, _: (
        None if _may_be_rounded(value) else rf"{as_tex(value)} + 2^{{-60}}"
    ),
    "three digits": lambda value, _: (
        f"{float(value):.3f}" if not _terminating(value) and 0.01 < abs(value) < 99 else None
    ),
    "an inequality": lambda value, _: rf"\ge {as_tex(value)}",
    "an inequality for x": lambda value, _: rf"x > {as_tex(value)}",
    "plus or minus": lambda value, _: rf"\pm {as_tex(abs(value))}" if value else None,
    "two things": lambda value, _: rf"{as_tex(value)} \text{{ apples and }} 5 \text{{ pears}}",
    "or more": lambda value, _: rf"{as_tex(value)} \text{{ or more}}",
    "not": lambda value, _: rf"\text{{not }} {as_tex(value)}",
    "an exponent": lambda value, _: rf"{as_tex(value)}^{{x}}" if value not in (0, 1, -1) else None,
    "a factor": lambda value, _: rf"{as_tex(value)}\pi" if value else None,
    "a sequence": lambda value, _: rf"1, 2, \ldots, {as_tex(value)}",
    "a digit in front": lambda value, _: "1" + as_tex(value) if value.denominator == 1 and value > 0 else None,
    "groups of three and one more": lambda value, _: f"{as_tex(value)},000" if value.denominator == 1 and 0 < value < 999 else None,
}  # fmt: skip
INEQUIVALENT: dict[str, Rule] = {
    **{name: on_value(change) for name, change in _VALUE_CHANGES.items()},
    "a box that never closes": in_response("First \\boxed{GOLD}; so \\boxed{GOLD + 1"),
    "right, then wrong": in_response("\\boxed{GOLD}? No: \\boxed{123454321}."),
    "a word behind it": on_text(lambda gold, _: gold + r" \text{ is wrong}"),
    "tuple in another order": on(TUPLE, _tuple_swapped),
    "a member missing": on(LIST, _without_member),
    "a member more": on(LIST, lambda m, _: m[0] + ", 987654"),
    "another base": on(BASED, _other_base),
    "the digits in base ten": on(BASED, lambda m, _: m[1] + "_{10}" if m[2] != "10" and len(m[1].lstrip("0")) > 1 else None),
    "another unit": on(UNIT, lambda m, _: m[1] + r" \text{ miles}"),
    "another power of the unit": on(UNIT, lambda m, _: m[1] + rf" \text{{ {m[2]}}}^5" if m[2] != "degrees" else None),
    "the other half of the day": on(_CLOCK, lambda m, _: f"{m[1]}:{m[2]} {'p' if m[3] == 'a' else 'a'}.m."),
    "ratio turned round": on(_RATIO, lambda m, _: f"{m[2]}:{m[1]}" if int(m[1]) != int(m[2]) else None),
    "interval of another kind": on(
        re.compile(r"[\[(]([^()\[\],]+,[^()\[\],]+)\]"), lambda m, _: f"({m[1]})"
    ),
    "letters of the word": on(_WORD, lambda m, _: "".join(sorted(m[1] or m[2])) if sorted(m[1] or m[2]) != list(m[1] or m[2]) else None),
}  # fmt: skip
