"""Characters and LaTeX that mean the same: the first half of the table of `verify.spelling`.

Patterns have names; a row says what is written, what becomes of it, and why the rule is there.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

Replacement = str | Callable[[re.Match[str]], str]


class Rule(NamedTuple):
    """One rule: what its pattern finds is replaced."""

    written: str  # an example
    becomes: str  # what `respell` makes of the example
    evidence: str  # data with such rows, or the spelling of the metamorphic test that needs it
    pattern: re.Pattern[str]
    replacement: Replacement


def rule(
    written: str, becomes: str, evidence: str, pattern: str, replacement: Replacement
) -> Rule:
    return Rule(written, becomes, evidence, re.compile(pattern), replacement)


SIGNS = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "⁄": "/",
    "∕": "/", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "±": r"\pm ", "∓": r"\mp ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "…": r"\ldots ",
    "⋯": r"\ldots ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "℃": r"^\circ C",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "。": ".", "、": ",",
    "∶": ":", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ", "≧": r"\ge ",
    "⊂": r"\subset ", "⊆": r"\subseteq ", "∖": r"\setminus ", "：": ":", "∀": r"\forall ",
    "≡": r"\equiv ", "Ω": r"\Omega ",
}  # fmt: skip
_GREEK = (
    "αalpha βbeta γgamma δdelta εepsilon θtheta λlambda μmu νnu ρrho σsigma τtau "
    "φphi ψpsi ωomega"
)
SIGNS |= {word[0]: rf"\{word[1:]} " for word in _GREEK.split()}
END = r"(?![a-zA-Z])"  # of a command
_GREEK_NAMES = "|".join(word[1:] for word in _GREEK.split()) + "|pi"
TOKEN = rf"(?:\{{([^{{}}]*)\}}|(\d|[a-zA-Z]|\\(?:{_GREEK_NAMES})(?![a-zA-Z])))"

_ESCAPED_TWICE = (
    rf"(?<!\\)\\(?=\\(?:[dt]?frac|text|sqrt|boxed|le|ge|times|cdot|pi|infty){END})"
)
_VULGAR_FRACTION = "[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]"
_SUPERSCRIPT = "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+"
_SUBSCRIPT = "[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+"
_ROOT_SIGN = r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))"
_INNER_BOX = r"\\(?:boxed|fbox)\s*\{([^{}]*)\}"
_FORMULA_MARK = r"(?:(?<!\\)(?:\\[\[\]()]|\$)\s*)+"
_SIZE = rf"\\(?:left|right|middle|[bB]igg?[lrm]?){END}\.?"
_STYLE = rf"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|[lL]arge){END}\s*"
_COLOUR = r"\\(?:text)?color\s*\{[^{}]*\}"
_EQUATIONS = r"\\begin\{(cases|aligned|split|gathered)\}([^&]*?)\\end\{\1\}"
_BARE_FRACTION = rf"\\(frac)\s*{TOKEN}\s*{TOKEN}"
_BARE_BINOMIAL = rf"\\[dt]?(binom)\s*{TOKEN}\s*{TOKEN}"
_ROOT_OF = rf"(\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|(?!\{{){TOKEN})"
_BARE_ROOT = rf"\\sqrt\s*(\[\w+\])?\s*{_ROOT_OF}"
_CHOOSE = r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"
_FONT = r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|bm|boldsymbol)\s*(?=\{)"
_NUMBER_IN_TEXT = r"\\text\{([^{}^*/]*\d[^{}^*/]*)\}"
_CURRENCY_IN_TEXT = r"\\text\{\s*(\\\$|[€£¥₹¢])\s*\}"
_OPTION_AND_TEXT = r"\\text\{\s*(\(?[A-J][).:])\s+([^{}]+)\}"
_CONSTANT_IN_TEXT = r"\\text\{\s*([ei])\s*\}"
# Units: several \text joined by signs, one \text with signs inside, a fraction, parentheses.
_GAP = r"(?:\\[,;: ]|~|\s)*"
_POWER = r"(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))"
_UNIT = rf"\\text\{{[^{{}}]*\}}\s*{_POWER}?"
_PRODUCT_OF_UNITS = rf"(?:{_UNIT}\s*(?:/|\\cdot{END}|\\times{END})\s*)+{_UNIT}"
_UNIT_WITH_SIGNS = (
    r"\\text(?=\{)\{((?:[^{}]|\{-?\d\})*(?:\^|\\cdot|\\[,;: ]|\\(?:Omega|mu))"
    r"(?:[^{}]|\{-?\d\})*)\}"
)
_FRACTION_OF_UNITS = rf"\\frac\{{\s*({_UNIT})\s*\}}\{{\s*({_UNIT})\s*\}}"
_OHM = rf"(?<=\d){_GAP}\\Omega\s*$"
_METRES = "(?<=[0-9])\\s*([kcdm]?m)([²³])"


def _plain_characters(match: re.Match[str]) -> str:
    text = unicodedata.normalize("NFKC", match[0])
    return re.sub(r"\d", lambda digit: str(unicodedata.digit(digit[0])), text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _power_of_metres(match: re.Match[str]) -> str:
    return rf"\text{{ {match[1]}}}^{{{2 if match[2] == '²' else 3}}}"


def _script(sign: str) -> Replacement:
    return lambda match: f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}"


def _root(match: re.Match[str]) -> str:
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return rf"\sqrt{degree}{{{match[2] or match[3] or match[4]}}}"


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match[2] or match[3], match[4] or match[5]
    return rf"\{match[1]}{{{top}}}{{{bottom}}}" if top and bottom else match[0]


def _one_text(match: re.Match[str]) -> str:
    r"""A unit in one \text without braces inside: \text{kg*m/s^2}."""
    unit = (
        re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", "*", match[0])
        .replace(r"\Omega", "ohm")
        .replace(r"\mu", "mu")
    )
    unit = re.sub(r"\\[,;: ]", " ", re.sub(r"\\text|[{}]", "", unit))
    return rf"\text{{{unit}}}"


def _quotient_of_units(match: re.Match[str]) -> str:
    top, bottom = (re.sub(r"\\text|[{}]", "", unit).strip() for unit in match.groups())
    return rf"\text{{{top}/{bottom}}}"


# Scripts leave a minus sign, which is made a plain one with the other signs.
LAYOUT = (
    rule(r"\\frac{1}{2}", r"\frac{1}{2}", "math-verify's tests", _ESCAPED_TWICE, ""),
    rule("2½", r"2\frac{1}{2}", "½", _VULGAR_FRACTION, _vulgar_fraction),
    rule("5m²", r"5\text{ m}^{2}", "math-verify's tests", _METRES, _power_of_metres),
    rule("x²", "x^{2}", "superscripts", _SUPERSCRIPT, _script("^")),
    rule("52₈", "52_{8}", "base in Unicode", _SUBSCRIPT, _script("_")),
    rule(
        "x ≤ −3",
        r"x \le -3",
        "degree sign",
        f"[{''.join(SIGNS)}]",
        lambda m: SIGNS[m[0]],
    ),
    rule("３４", "34", "full-width digits", r"[^\x00-\x7f]+", _plain_characters),
    rule("2√14", r"2\sqrt{14}", "√", _ROOT_SIGN, _root),
    rule(r"\boxed{7}", "7", "DeepScaleR", _INNER_BOX, r"\1"),
    rule("$x$", "x", "formula marks in the box", _FORMULA_MARK, " "),
    rule(r"\left( 2, 3 \right)", "( 2, 3 )", "braces of a maximum", _SIZE, ""),
    rule(
        r"\lbrace 1 \rbrace",
        r"\{ 1 \}",
        "\\lbrace",
        rf"\\([lr])brace{END}",
        lambda match: r"\{" if match[1] == "l" else r"\}",
    ),
    rule(
        r"\langle 1, 2\rangle",
        "( 1, 2)",
        "\\langle",
        rf"\\([lr])angle{END}",
        lambda match: "(" if match[1] == "l" else ")",
    ),
    rule(r"\displaystyle 7", "7", "\\displaystyle", _STYLE, ""),
    rule(r"\textcolor{red}{7}", "{7}", "colour", _COLOUR, ""),
    rule("x&=2", "x=2", "math-verify's tests", r"&\s*(?==)", ""),
    rule(
        r"\begin{cases}x=2\\y=3\end{cases}",
        "x=2, y=3",
        "cases",
        _EQUATIONS,
        lambda match: match[2].replace(r"\\", ", "),
    ),
    rule(
        r"\dfrac{3}{4}",
        r"\frac{3}{4}",
        "percent sign added to a fraction",
        rf"\\[dtc]frac{END}",
        r"\\frac",
    ),
    rule(
        r"\frac34", r"\frac{3}{4}", "fraction without braces", _BARE_FRACTION, _fraction
    ),
    rule(r"\sqrt[3]\pi", r"\sqrt[3]{\pi}", "DeepScaleR", _BARE_ROOT, r"\\sqrt\1{\2}"),
    rule(
        r"\binom94",
        r"\binom{9}{4}",
        "binomial without braces",
        _BARE_BINOMIAL,
        _fraction,
    ),
    rule(
        r"\mathbb R",
        r"\mathbb{R}",
        "\\mathbb R",
        r"\\mathbb\s+([A-Z])",
        r"\\mathbb{\1}",
    ),
    rule(r"{10 \choose 3}", r"\binom{10}{3}", "\\choose", _CHOOSE, r"\\binom{\1}{\2}"),
    rule(r"\mathrm{east}", r"\text{east}", "word with \\text", _FONT, r"\\text"),
    rule(
        r"\text{(A) The cat}",
        r"\text{(A)} \text{The cat}",
        "option with its text",
        _OPTION_AND_TEXT,
        r"\\text{\1} \\text{\2}",
    ),
    rule(r"\text{\$}5", r"\$5", "currency in \\text", _CURRENCY_IN_TEXT, r"\1"),
    rule(r"3\mathrm{i}", "3 i", "math-verify's tests", _CONSTANT_IN_TEXT, r" \1 "),
    rule(
        r"5\mathrm{m\,s^{-2}}",
        r"5\text{m s^-2}",
        "unit in one \\mathrm",
        _UNIT_WITH_SIGNS,
        _one_text,
    ),
    rule(
        r"5\text{ km} / \text{h}",
        r"5\text{ km / h}",
        "DeepScaleR",
        _PRODUCT_OF_UNITS,
        _one_text,
    ),
    rule(
        r"5\frac{\text{m}}{\text{s}}",
        r"5\text{m/s}",
        "fraction of units",
        _FRACTION_OF_UNITS,
        _quotient_of_units,
    ),
    rule(r"\text{24 hours}", "24 hours", "DeepScaleR", _NUMBER_IN_TEXT, r" \1 "),
    rule(
        r"5\mu \text{m}", r"5\text{mum}", "micro", r"\\mu\s*\\text\{\s*", r"\\text{mu"
    ),
    rule(r"5\Omega", r"5\text{ ohm}", "ohm", _OHM, r"\\text{ ohm}"),
    rule(r"7 \\", "7", "line end in the box", r"\\+\s*$", ""),
)
