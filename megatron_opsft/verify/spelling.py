"""One spelling for one answer: gold answers and answers are rewritten to it before they are read.

`respell` applies the rules of `TABLE` from top to bottom. Each row says what people write, what
becomes of it, and the pattern and replacement that do it. No rule drops anything that can change
the value: words, units and signs that no rule knows are still there for `verify.reading`.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

Replacement = str | Callable[[re.Match[str]], str]


class Rule(NamedTuple):
    """`pattern` is replaced; `written` is an example, and `becomes` what `respell` makes of it."""

    written: str
    becomes: str
    pattern: re.Pattern[str]
    replacement: Replacement


_SIGNS = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "⁄": "/",
    "∕": "/", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "±": r"\pm ", "∓": r"\mp ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "…": r"\ldots ",
    "⋯": r"\ldots ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "℃": r"^\circ C",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "。": ".", "、": ",",
    "∶": ":", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_RADIX = {"x": 16, "o": 8, "b": 2}
_DIGIT = re.compile(r"\d")
_END = r"(?![a-zA-Z])"  # of a command
_TOKEN = r"(?:\{([^{}]*)\}|(\d|[a-zA-Z]))"
_SPACE = r"(?:(?<!\\)\\[,;:! ]|~|\\thinspace\b|\{\}|\{ \}|[ \u00a0\u2009\u202f])"


def _plain_characters(match: re.Match[str]) -> str:
    text = unicodedata.normalize("NFKC", match[0])
    return _DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _script(sign: str, digits: dict[int, int]) -> Replacement:
    return lambda match: f"{sign}{{{match[0].translate(digits)}}}"


def _root(match: re.Match[str]) -> str:
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return rf"\sqrt{degree}{{{match[2] or match[3] or match[4]}}}"


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2], match[3] or match[4]
    return rf"\frac{{{top}}}{{{bottom}}}" if top and bottom else match[0]


def _joined(match: re.Match[str]) -> str:
    """The digits of a number without what separates its groups."""
    return re.sub(r"[^\d.]", "", match[0])


def _joined_outside_brackets(match: re.Match[str]) -> str:
    """1,234, but for (1,234), which is two numbers."""
    before = match.string[: match.start()]
    inside = any(before.count(a) > before.count(b) for a, b in ("()", "[]", (r"\{", r"\}")))
    return match[0] if inside else _joined(match)


def _power_of_ten(match: re.Match[str]) -> str:
    power = next(filter(None, match.groups())).replace(" ", "")
    return rf"\cdot 10^{{{int(power)}}}"


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction that it is."""
    whole, fixed, period = match[1] or "0", match[2], next(filter(None, match.groups()[2:]))
    nines = 10 ** len(fixed) * (10 ** len(period) - 1)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{nines}}}"


def _rule(
    written: str, becomes: str, pattern: str, replacement: Replacement, flags: int = 0
) -> Rule:
    return Rule(written, becomes, re.compile(pattern, flags), replacement)


# fmt: off
TABLE = (
    # Characters.
    _rule("2½", r"2\frac{1}{2}", "[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", _vulgar_fraction),
    _rule("x²", "x^{2}", "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", _script("^", _SUPERSCRIPTS)),
    _rule("52₈", "52_{8}", "[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+", _script("_", _SUBSCRIPTS)),
    _rule("x ≤ −3", r"x \le -3", f"[{''.join(_SIGNS)}]", lambda match: _SIGNS[match[0]]),
    _rule("３４", "34", r"[^\x00-\x7f]+", _plain_characters),
    _rule("3\u200b4", "34", "[\u200b-\u200f\u2060\ufeff\u00ad]", ""),
    _rule("2√14", r"2\sqrt{14}", r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))", _root),
    # Layout.
    _rule(r"\boxed{7}", "7", r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r"\1"),
    _rule(r"1 \\[2pt] 2", r"1 \\ 2", r"\\\\\s*\[[^\]]*\]", r"\\\\"),
    _rule("$x$", "x", r"(?<!\\)\\[\[\]()]|(?<!\\)\$", " "),
    _rule("**7**", "7", r"\*\*([^*]+)\*\*", r"\1"),
    _rule(r"\left( 2, 3 \right)", "( 2, 3 )", rf"\\(?:left|right|middle|[bB]igg?[lrm]?){_END}\.?", ""),
    _rule(r"\displaystyle 7", "7", rf"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|[lL]arge){_END}\s*", ""),
    _rule(r"\dfrac{3}{4}", r"\frac{3}{4}", rf"\\[dtc]frac{_END}", r"\\frac"),
    _rule(r"\frac34", r"\frac{3}{4}", rf"\\frac\s*{_TOKEN}\s*{_TOKEN}", _fraction),
    _rule(r"\sqrt2", r"\sqrt{2}", r"\\sqrt\s*(\d|[a-zA-Z])", r"\\sqrt{\1}"),
    _rule(r"\mathrm{east}", r"\text{east}", r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|bm|boldsymbol)\s*(?=\{)", r"\\text"),
    _rule(r"\text{24 hours}", "24 hours", r"\\text\{([^{}]*\d[^{}]*)\}", r" \1 "),
    # Numbers.
    _rule(r"3.141\,593", "3.141593", rf"\.\d{{3}}(?:{_SPACE}\d{{3}})+(?!\d)", _joined),
    _rule(r"10\,000", "10000", rf"(?<![\d.])[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?!\d)", _joined),
    _rule("1{,}234", "1234", r"(?<![\d.])[1-9]\d{0,2}(?:(?:\{,\}|,\\!)\s*\d{3})+(?!\d)", _joined),
    _rule("1,234", "1234", r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", _joined_outside_brackets),
    _rule("37{,}5", "37.5", r"(\d)\{,\}(\d)", r"\1.\2"),
    _rule("2.5e-05", r"2.5\cdot 10^{-5}", r"(?<![a-zA-Z_\\])(?:(?<=\d)|(?<=\d\.))(?:[eE]([+-]?\d\d+)|[eE](\+\d)|E(-?\d)|(?<=\.\d)e(-?\d)|(?<=\.\d\d)e(-?\d))(?!\w)", _power_of_ten),
    _rule("2.5 x 10^-5", r"2.5\cdot 10^{-5}", r"(?<=[\d.])\s*(?:x|X|\*|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\s*\d+)\s*\}?", _power_of_ten),
    _rule(r"0.1\overline{6}", r"\frac{15}{90}", r"(?<![\d.])(\d*)\.(\d*)(?:\\overline\{(\d+)\}|\\bar\{?(\d+)\}?|\\dot\{?(\d)\}?|\((\d+)\))", _repeating),
    # Spaces and synonyms.
    _rule(r"1\!:\!2", "1:2", r"\\!", ""),
    _rule(r"1,\;2", "1, 2", r"(?<!\\)\\[,;: ]|~|\\q?quad\b|\\thinspace\b|\\enspace\b|\\hspace\{[^{}]*\}", " "),
    _rule(r"x \leqslant 3", r"x \le 3", rf"\\(le|ge)(?:q|qslant|slant){_END}", r"\\\1 "),
    _rule("x <= 3", r"x \le 3", r"(?<![<=>])([<>])=", lambda match: r"\le " if match[1] == "<" else r"\ge "),
    _rule("x != 3", r"x \ne 3", rf"\\neq{_END}|!=", r"\\ne "),
    _rule(r"x \lt 3", "x < 3", rf"\\([lg])t{_END}", lambda match: "<" if match[1] == "l" else ">"),
    _rule(r"1, 2, ...", r"1, 2, \ldots", rf"\\(?:dots[cbmi]?|cdots|hdots){_END}|\.{{3,}}", r"\\ldots "),
    _rule("0.333...", r"\frac{3}{9}", r"(?<![\d.])(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,6}?)\4+)\s*\\ldots\s*$", _repeating),
    _rule(r"\lbrace 1 \rbrace", r"\{ 1 \}", rf"\\([lr])brace{_END}", lambda match: r"\{" if match[1] == "l" else r"\}"),
    _rule(r"\langle 1, 2\rangle", "( 1, 2)", rf"\\([lr])angle{_END}", lambda match: "(" if match[1] == "l" else ")"),
    _rule(r"\{x \mid x>3\}", "x>3", r"^\s*\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}[\s.]*$", r"\1"),
    _rule(r"\varnothing", r"\emptyset", rf"\\varnothing{_END}", r"\\emptyset "),
    _rule(r"1 \colon 2", "1 : 2", rf"\\colon{_END}|\\text\{{\s*:\s*\}}", ":"),
    _rule("3 to 4", "3:4", r"(?<=\d)\s*(?:\\text\{\s*)?\bto\b(?:\s*\})?\s*(?=\d)", ":"),
    _rule(r"1 \bmod 6", r"1 \pmod{6}", r"\(?\s*(?:\\p?mod|\\bmod|\\text\{\s*mod\s*\})\s*\{?\s*(\w+)\s*\}?\s*\)?", r" \\pmod{\1}"),
    _rule("2**3", "2^3", r"\*\*", "^"),
    _rule("sqrt(2)", r"\sqrt{2}", r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    _rule("2pi", r"2\pi", rf"(?<![\\a-zA-Z])pi{_END}", r"\\pi "),
    _rule("infinity", r"\infty", rf"(?<![\\a-zA-Z])(?:infinity|infty|inf|oo){_END}", r"\\infty ", re.IGNORECASE),
    _rule("0x1F", "1F_{16}", r"(?<![\w.])0([xXoObB])([0-9A-Fa-f]+)(?!\w)", lambda match: f"{match[2].upper()}_{{{_RADIX[match[1].lower()]}}}"),
    # Words for signs, and signs for units.
    _rule(r"\sin 60^\circ", r"\sin(\frac{60\pi }{180})", r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?)\s*[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?", r"\1(\\frac{\2\\pi }{180})"),
    _rule("155 degrees", r"155 ^\circ", rf"\\degree{_END}|(?:\{{\}})?\^\s*\{{?\s*\\circ\s*\}}?|(?:\\text\{{\s*)?(?<![\\a-zA-Z])(?:degrees?|deg)\b(?:\s*\}})?", r"^\\circ "),
    _rule("25°C", r"25\text{celsius}", rf"\^\\circ\s*(?:\\text\{{\s*)?C{_END}(?:\s*\}})?", r"\\text{celsius}"),
    _rule("25°F", r"25\text{fahrenheit}", rf"\^\\circ\s*(?:\\text\{{\s*)?F{_END}(?:\s*\}})?", r"\\text{fahrenheit}"),
    _rule("5 percent", r"5 \%", r"\\?%|(?:\\text\{\s*)?(?<![a-zA-Z])(?:per\s?cent(?:age)?|pct)\b\.?(?:\s*\})?", r"\\% "),
    _rule("5 million", r"5\cdot 10^{6}", rf"\s*(?:\\text\{{\s*)?(?<![a-zA-Z\\])({'|'.join(_SCALES)})s?{_END}(?:\s*\}})?", lambda match: rf"\cdot 10^{{{_SCALES[match[1].lower()]}}} ", re.IGNORECASE),
    _rule(r"2 \text{ and } 3", "2, 3", rf"\s*\\text\{{\s*,?\s*(?:and|or)\s*,?\s*\}}|\s*(?<![a-zA-Z\\])(?:and|or){_END}", ", "),
    _rule(r"2\text{ }", "2", r"\\text\{\s*\}", " "),
    _rule('"12"', "12", r"^\s*\\?[\"'`]+(.*?)\\?[\"'`]+[.,]?\s*$", r"\1"),
    _rule("16''", r"16\text{ in}", r"(?<=\d)\s*(?:''|\")(?!')", r"\\text{ in}"),
    _rule("5'", r"5\text{ ft}", r"(?<=\d)\s*'(?!')", r"\\text{ ft}"),
    _rule(r"\approx 3", "3", rf"^\s*(?:\\approx|\\simeq|\\sim|~){_END}\s*", ""),
    _rule("+5", "5", r"^\s*\+\s*(?=[\d.\\])", ""),
    _rule("1, , 2", "1, 2", r"\s*,(?:\s*,)+\s*", ", "),
    _rule("x  +  1", "x + 1", r"\s+", " "),
    _rule("34.", "34", r"\s*[.,;]+\s*$", ""),
)
# fmt: on


def respell(text: str) -> str:
    """The same answer in the one spelling that `verify.reading` reads."""
    for rule in TABLE:
        text = rule.pattern.sub(rule.replacement, text)
    return text.strip()
