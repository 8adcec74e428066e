"""Rules that write a gold answer in another way: equivalent spellings, and answers that are wrong.

Each rule takes a gold answer and a random generator, and gives the text of a response, or None
where it does not apply. `EQUIVALENT` keeps the answer, `INEQUIVALENT` changes it.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from random import Random

Rule = Callable[[str, Random], str | None]

_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+\.\d+")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)")
_BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)\s*(?:\\text\{)?\s*([ap])\.?m\.?\s*\}?")
_RATIO = re.compile(r"(\d+)\s*:\s*(\d+)")
_TUPLE = re.compile(r"\((-?[^(),]+(?:,-?[^(),]+)+)\)")
_LIST = re.compile(r"(?!-?\d{1,3}(?:,\d{3})+$)-?\d+(?:,\s*-?\d+)+")
_UNIT = re.compile(
    r"(-?[\d.]+)\s*\\(?:text|mbox|mathrm)\{\s*~?(cm|inches|feet|hours|km|degrees|dollars)\s*\}"
)
_WORD = re.compile(r"\\text\{([A-Za-z ]{2,})\}|([A-Z]?[a-z]{3,})")
_FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def _boxed(answer: str) -> str:
    return f"So.\n</think>\n\nThe answer is $\\boxed{{{answer}}}$."


def _clean(gold: str) -> str:
    """Without the marks of a formula, which do not belong in a box."""
    gold = gold.strip()
    for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if gold.startswith(opening) and gold.endswith(closing) and len(gold) > 2:
            gold = gold[len(opening) : -len(closing)].strip()
    return gold


def _as_fraction(gold: str) -> Fraction | None:
    """The value of an integer, a decimal or a plain fraction."""
    if _INTEGER.fullmatch(gold) or _DECIMAL.fullmatch(gold):
        return Fraction(gold)
    if match := _FRACTION.fullmatch(gold):
        sign = match[1] or match[4] or ""
        if int(match[3] or match[6]):
            return Fraction(int(sign + (match[2] or match[5])), int(match[3] or match[6]))
    return None


def _tex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _terminating(value: Fraction) -> str | None:
    """The decimal that says it exactly; None where there is none of few digits."""
    for digits in range(1, 9):
        if (value * 10**digits).denominator == 1:
            number = int(abs(value) * 10**digits)
            text = f"{number // 10**digits}.{number % 10**digits:0{digits}d}"
            return ("-" if value < 0 else "") + text
    return None


def _may_be_rounded(value: Fraction) -> bool:
    """Whether it is a decimal of so many digits that the judge takes it for a rounded one."""
    text = _terminating(value) or str(float(value)) if value.denominator > 1 else ""
    return len(text.replace(".", "").strip("-0")) >= 6


def _on(pattern: re.Pattern[str], rewrite: Callable[[re.Match[str], Random], str | None]) -> Rule:
    """A rule for golds that the pattern matches whole."""

    def rule(gold: str, random: Random) -> str | None:
        match = pattern.fullmatch(_clean(gold))
        answer = rewrite(match, random) if match else None
        return None if answer is None else _boxed(answer)

    return rule


def _on_value(rewrite: Callable[[Fraction, Random], str | None]) -> Rule:
    def rule(gold: str, random: Random) -> str | None:
        value = _as_fraction(_clean(gold))
        answer = None if value is None else rewrite(value, random)
        return None if answer is None else _boxed(answer)

    return rule


def _on_text(rewrite: Callable[[str, Random], str | None]) -> Rule:
    """A rule for any gold; where the rewritten text is the same, it does not apply."""

    def rule(gold: str, random: Random) -> str | None:
        clean = _clean(gold)
        answer = rewrite(clean, random)
        return None if answer is None or answer == clean else _boxed(answer)

    return rule


def _response(template: str) -> Rule:
    def rule(gold: str, random: Random) -> str | None:
        clean = _clean(gold)
        if "\n" in clean or "$" in clean or clean.startswith(r"\text"):
            return None
        return template.replace("GOLD", clean)

    return rule


def _replaced(pattern: str, replacement: str) -> Rule:
    return _on_text(lambda gold, _: re.sub(pattern, replacement, gold))


def _grouped(separator: str) -> Rule:
    def rewrite(match: re.Match[str], _: Random) -> str | None:
        return (
            f"{int(match[0]):,}".replace(",", separator) if len(match[0].strip("-")) > 4 else None
        )

    return _on(_INTEGER, rewrite)


def _mixed(value: Fraction, _: Random) -> str | None:
    whole, rest = divmod(abs(value), 1)
    if not whole or not rest:
        return None
    return ("-" if value < 0 else "") + f"{whole}" + _tex(Fraction(rest))


def _scientific(value: Fraction, _: Random) -> str | None:
    text = _terminating(value)
    if text is None or value == 0:
        return None
    mantissa, _, power = f"{float(value):.12e}".partition("e")
    exact = Fraction(mantissa) * Fraction(10) ** int(power)
    return (
        rf"{mantissa.rstrip('0').rstrip('.')} \times 10^{{{int(power)}}}"
        if exact == value
        else None
    )


def _programmed(value: Fraction, _: Random) -> str | None:
    text = _scientific(value, _)
    if text is None or "." not in text:
        return None
    mantissa, _, power = text.partition(r" \times 10^")
    return f"{mantissa}e{int(power.strip('{}')):+03d}"


def _members(gold: str) -> list[str]:
    return [part.strip() for part in gold.split(",")]


def _shuffled(match: re.Match[str], random: Random) -> str | None:
    parts = _members(match[0])
    random.shuffle(parts)
    return ", ".join(parts[:-1]) + rf" \text{{ and }} {parts[-1]}"


def _superscripts(gold: str, _: Random) -> str:
    return re.sub(r"\^(?:\{(\d+)\}|(\d))", lambda m: (m[1] or m[2]).translate(_SUPERSCRIPT), gold)


_ROOT = r"\\sqrt\{(\d+)\}"
EQUIVALENT: dict[str, Rule] = {
    "box": lambda gold, _: _boxed(_clean(gold)),
    "box in a displayed formula": _response("</think>\n\\[\n\\boxed{GOLD}\n\\]"),
    "space before the brace": _response("So we get \\boxed {GOLD}."),
    "fbox": _response("So we get \\fbox{GOLD}."),
    "an earlier box": _response("First \\boxed{12345678}. No: \\boxed{GOLD}"),
    "Answer: line": _response("We add.\n\nAnswer: $GOLD$"),
    "bold Answer: line": _response("We add.\n\n**Answer:** $GOLD$."),
    "The answer is": _response("We add. The answer is \\(GOLD\\)."),
    "The final answer is, after a box": _response(
        "\\boxed{87654321}? No. The final answer is $GOLD$. I hope it is correct."
    ),
    "full stop in the box": _on_text(lambda gold, _: gold + "."),
    "formula marks in the box": _on_text(lambda gold, _: None if "$" in gold else f"${gold}$"),
    "\\displaystyle": _on_text(lambda gold, _: r"\displaystyle " + gold),
    "\\left and \\right": _on_text(
        lambda gold, _: gold if r"\left" in gold or r"\text" in gold
        else re.sub(r"(?<![\\\w])\(", r"\\left(", gold).replace(")", r"\right)")
        if re.search(r"(?<![\\\w])\(", gold) and gold.count("(") == len(re.findall(r"(?<![\\\w])\(", gold))
        and "[" not in gold and "]" not in gold else gold
    ),
    "\\dfrac": _replaced(r"\\[dt]?frac", r"\\dfrac"),
    "thin spaces": _replaced(r"(?<=[\d}])\s*([+=])\s*(?=[\d\\a-z])", r"\\,\1\\;"),
    "full-width digits": _on_text(
        lambda gold, _: re.sub(r"\d", lambda m: m[0].translate(_FULL_WIDTH), gold)
    ),
    "Unicode minus": _replaced("-", "−"),
    "Unicode times and dots": _replaced(r"\\times|\\cdot(?![a-z])", "×"),
    "√": _replaced(_ROOT, r"√\1"),
    "π": _replaced(r"\\pi(?![a-z])", "π"),
    "∞": _replaced(r"\\infty", "∞"),
    "≤ and ≥": _on_text(
        lambda gold, _: re.sub(r"\\leq?(?![a-z])", "≤", re.sub(r"\\geq?(?![a-z])", "≥", gold))
    ),
    "∪": _replaced(r"\\cup", "∪"),
    "superscripts": _on_text(_superscripts),
    "degree sign": _replaced(r"\^\{?\\circ\}?", "°"),
    "degree sign left out": _on(re.compile(r"(\d+)\s*\^\{?\\circ\}?"), lambda m, _: m[1]),
    "degrees": _on(re.compile(r"(\d+)\s*\^\{?\\circ\}?"), lambda m, _: m[1] + r" \text{ degrees}"),
    "groups 1,234": _grouped(","),
    "groups 1{,}234": _grouped("{,}"),
    "groups 1\\,234": _grouped(r"\,"),
    "groups 1 234": _grouped(" "),
    "groups by a thin space of Unicode": _grouped("\u202f"),
    "plus sign": _on(re.compile(r"\d+"), lambda m, _: "+" + m[0]),
    "whole number as a decimal": _on(_INTEGER, lambda m, _: m[0] + ".0"),
    "trailing zeros": _on(_DECIMAL, lambda m, _: m[0] + "00"),
    "x =": _on(_INTEGER, lambda m, _: "x = " + m[0]),
    "a unit": _on(_INTEGER, lambda m, _: m[0] + r" \text{ apples}"),
    "a unit without \\text": _on(_INTEGER, lambda m, _: m[0] + " dollars"),
    "a measure": _on(_INTEGER, lambda m, _: m[0] + r"\,\mathrm{cm}^2"),
    "a currency": _on(re.compile(r"\d+"), lambda m, _: r"\$" + m[0]),
    "a Chinese unit": _on(re.compile(r"\d+"), lambda m, _: m[0] + "元"),
    "unit in other words": _on(
        _UNIT, lambda m, _: m[1] + {"cm": " centimeters", "inches": r"\text{ in}", "feet": r" \text{ ft}",
            "hours": " hours", "km": r"\text{ kilometers}", "degrees": "°", "dollars": " USD"}[m[2]]
    ),
    "unit left out": _on(_UNIT, lambda m, _: m[1]),
    "percent sign left out": _on(re.compile(r"(-?[\d.]+)\s*\\?%"), lambda m, _: m[1]),
    "percent": _on(re.compile(r"(-?[\d.]+)\s*\\?%"), lambda m, _: m[1] + " percent"),
    "percent sign added": _on_text(
        lambda gold, _: gold + r"\%" if _INTEGER.fullmatch(gold) or _DECIMAL.fullmatch(gold) else None
    ),
    "option letter": _on_value(lambda value, random: rf"\textbf{{({random.choice('ABCDE')})}}\ {_tex(value)}"),
    "option letter, plain": _on_value(lambda value, random: rf"({random.choice('ABCDE')}) {_tex(value)}"),
    "a / b": _on(_FRACTION, lambda m, _: f"{m[1] or m[4] or ''}{m[2] or m[5]}/{m[3] or m[6]}"),
    "fraction times two": _on_value(
        lambda value, _: rf"\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"
    ),
    "mixed number": _on_value(_mixed),
    "decimal": _on_value(lambda value, _: _terminating(value)),
    "six digits of a fraction": _on_value(
        lambda value, _: None if _terminating(value) or value == 0 else f"{float(value):.8g}"
        if 1e-3 < abs(value) < 1e7 else None
    ),
    "fraction of a decimal": _on(_DECIMAL, lambda m, _: _tex(Fraction(m[0]))),
    "scientific": _on_value(_scientific),
    "2.5e-05": _on_value(_programmed),
    "in brackets": _on(_INTEGER, lambda m, _: f"({m[0]})"),
    "base in braces": _on(_BASED, lambda m, _: f"{m[1]}_{{{m[2]}}}"),
    "base in words": _on(_BASED, lambda m, _: rf"{m[1]} \text{{ (base {m[2]})}}"),
    "base as text": _on(_BASED, lambda m, _: rf"{m[1]}_{{\text{{{m[2]}}}}}"),
    "base in Unicode": _on(_BASED, lambda m, _: m[1] + m[2].translate(_SUBSCRIPT)),
    "time": _on(_CLOCK, lambda m, _: rf"{m[1]}\!:\!{m[2]} \text{{ {m[3]}.m.}}"),
    "time in capitals": _on(_CLOCK, lambda m, _: rf"{m[1]}:{m[2]}\,{m[3].upper()}M"),
    "ratio with spaces": _on(_RATIO, lambda m, _: rf"{m[1]} \colon {m[2]}"),
    "tuple with spaces": _on(_TUPLE, lambda m, _: r"\left( " + r" ,\ ".join(_members(m[1])) + r" \right)"),
    "column vector": _on(
        _TUPLE, lambda m, _: r"\begin{pmatrix} " + r" \\ ".join(_members(m[1])) + r" \end{pmatrix}"
    ),
    "list in another order": _on(_LIST, _shuffled),
    "list as a set": _on(_LIST, lambda m, _: rf"\{{{m[0]}\}}" if len(set(_members(m[0]))) == len(_members(m[0])) else None),
    "word without \\text": _on(_WORD, lambda m, _: m[1] or m[2]),
    "word with \\text": _on(_WORD, lambda m, _: rf"\mathrm{{{m[1] or m[2]}}}"),
    "word in capitals": _on(_WORD, lambda m, _: rf"\textbf{{{(m[1] or m[2]).upper()}}}"),
}  # fmt: skip


def _changed_digit(gold: str, random: Random) -> str | None:
    """One digit of the only number, or of the first of a formula of plain numbers."""
    if re.search(r"[\^_:]|\\text|\\mathrm|\\begin|0\b", gold) or not re.match(
        r"-?(?:\\frac\{)?\d", gold
    ):
        return None
    position = next(index for index, char in enumerate(gold) if char.isdigit())
    digit = random.choice([d for d in "123456789" if d != gold[position]])
    changed = gold[:position] + digit + gold[position + 1 :]
    before, after = _as_fraction(gold), _as_fraction(changed)
    return None if before is not None and before == after else changed


def _tuple_swapped(match: re.Match[str], _: Random) -> str | None:
    parts = _members(match[1])
    swapped = [parts[1], parts[0], *parts[2:]]
    return None if parts[0] == parts[1] else f"({', '.join(swapped)})"


def _without_member(match: re.Match[str], random: Random) -> str | None:
    parts = list(dict.fromkeys(_members(match[0])))
    parts.pop(random.randrange(len(parts)))
    return ", ".join(parts) if parts else None


def _other_base(match: re.Match[str], _: Random) -> str | None:
    return f"{match[1]}_{{{int(match[2]) + 1}}}" if len(match[1].lstrip("0")) > 1 else None


_VALUE_CHANGES: dict[str, Callable[[Fraction, Random], str | None]] = {
    "sign": lambda value, _: _tex(-value) if value else None,
    "one more": lambda value, _: _tex(value + 1),
    "one less": lambda value, _: _tex(value - 1),
    "twice": lambda value, _: _tex(2 * value) if value else None,
    "half": lambda value, _: _tex(value / 2) if value else None,
    "ten times": lambda value, _: _tex(10 * value) if value else None,
    "reciprocal": lambda value, _: _tex(1 / value) if value not in (0, 1, -1) else None,
    "square": lambda value, _: _tex(value**2) if value not in (0, 1) else None,
    "a tiny difference, as a fraction": lambda value, _: (
        _tex(value * Fraction(10**9 + 1, 10**9)) if value and not _may_be_rounded(value) else None
    ),
    "a tiny difference, as a decimal": lambda value, _: (
        f"{float(value) * (1 + 1e-5):.10g}" if 1e-3 < abs(value) < 1e4 and _terminating(value) else None
    ),
    "a tiny difference, as a power": lambda value, _: (
        None if _may_be_rounded(value) else rf"{_tex(value)} + 2^{{-60}}"
    ),
    "three digits": lambda value, _: (
        f"{float(value):.3f}" if not _terminating(value) and 0.01 < abs(value) < 99 else None
    ),
    "an inequality": lambda value, _: rf"\ge {_tex(value)}",
    "an inequality for x": lambda value, _: rf"x > {_tex(value)}",
    "plus or minus": lambda value, _: rf"\pm {_tex(abs(value))}" if value else None,
    "two things": lambda value, _: rf"{_tex(value)} \text{{ apples and }} 5 \text{{ pears}}",
    "or more": lambda value, _: rf"{_tex(value)} \text{{ or more}}",
    "not": lambda value, _: rf"\text{{not }} {_tex(value)}",
    "an exponent": lambda value, _: rf"{_tex(value)}^{{x}}" if value not in (0, 1, -1) else None,
    "a factor": lambda value, _: rf"{_tex(value)}\pi" if value else None,
    "a sequence": lambda value, _: rf"1, 2, \ldots, {_tex(value)}",
    "a digit in front": lambda value, _: "1" + _tex(value) if value.denominator == 1 and value > 0 else None,
    "groups of three and one more": lambda value, _: f"{_tex(value)},000" if value.denominator == 1 and 0 < value < 999 else None,
}  # fmt: skip
INEQUIVALENT: dict[str, Rule] = {
    **{name: _on_value(change) for name, change in _VALUE_CHANGES.items()},
    "another digit": _on_text(_changed_digit),
    "a box that never closes": _response("First \\boxed{GOLD}; so \\boxed{GOLD + 1"),
    "right, then wrong": _response("\\boxed{GOLD}? No: \\boxed{123454321}."),
    "a word behind it": _on_text(lambda gold, _: gold + r" \text{ is wrong}"),
    "tuple in another order": _on(_TUPLE, _tuple_swapped),
    "a member missing": _on(_LIST, _without_member),
    "a member more": _on(_LIST, lambda m, _: m[0] + ", 987654"),
    "another base": _on(_BASED, _other_base),
    "the digits in base ten": _on(_BASED, lambda m, _: m[1] + "_{10}" if m[2] != "10" and len(m[1].lstrip("0")) > 1 else None),
    "another unit": _on(_UNIT, lambda m, _: m[1] + r" \text{ miles}"),
    "another power of the unit": _on(_UNIT, lambda m, _: m[1] + rf" \text{{ {m[2]}}}^5" if m[2] != "degrees" else None),
    "the other half of the day": _on(_CLOCK, lambda m, _: f"{m[1]}:{m[2]} {'p' if m[3] == 'a' else 'a'}.m."),
    "another minute": _on(_CLOCK, lambda m, _: f"{m[1]}:{(int(m[2]) + 1) % 60:02d} {m[3]}.m."),
    "ratio turned round": _on(_RATIO, lambda m, _: f"{m[2]}:{m[1]}" if int(m[1]) != int(m[2]) else None),
    "interval of another kind": _on(
        re.compile(r"[\[(]([^()\[\],]+,[^()\[\],]+)\]"), lambda m, _: f"({m[1]})"
    ),
    "letters of the word": _on(_WORD, lambda m, _: "".join(sorted(m[1] or m[2])) if sorted(m[1] or m[2]) != list(m[1] or m[2]) else None),
}  # fmt: skip
