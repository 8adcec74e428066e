"""Characters and LaTeX that mean the same: the first half of the table of `verify.spelling`.

Patterns have names; a row says what is written, what becomes of it, and why the rule is there.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

Match = re.Match[str]
Replacement = str | Callable[[Match], str]


class SpellingRule(NamedTuple):
    """A rule that replaces each match of its pattern."""

    example: str
    """`written -> becomes`: an answer, and the spelling that `respell` gives it."""
    evidence: str
    """Why the rule is there: data with such rows, or the spelling of the tests that needs it."""
    pattern: re.Pattern[str]
    replacement: Replacement


def rule(
    example: str, evidence: str, pattern: str, replacement: Replacement
) -> SpellingRule:
    return SpellingRule(example, evidence, re.compile(pattern), replacement)


def command(name: str, *arguments: object) -> str:
    r"""Return a LaTeX command: `command("frac", 1, 2)` is \frac{1}{2}."""
    return f"\\{name}" + "".join(f"{{{argument}}}" for argument in arguments)


def matched_group(match: Match) -> str:
    """Return the text of the alternative that matched, of several with one group each."""
    return next(filter(None, match.groups()))


# Characters, and the LaTeX that means the same.
_CHARACTERS = r"""
π \pi   ∞ \infty   ≤⩽≦ \le   ≥⩾≧ \ge   ≠ \ne   ≈ \approx   ≡ \equiv   × \times   ·⋅∙ \cdot   ÷ \div
± \pm   ∓ \mp   ∪ \cup   ∩ \cap   ∅ \emptyset   ∈ \in   ⊂ \subset   ⊆ \subseteq   ∖ \setminus
∀ \forall   …⋯ \ldots   °º˚ ^\circ   ⟨ \langle   ⟩ \rangle   ⌊ \lfloor   ⌋ \rfloor   ⌈ \lceil
⌉ \rceil   α \alpha   β \beta   γ \gamma   δ \delta   ε \epsilon   θ \theta   λ \lambda
μ \mu   ν \nu   ρ \rho   σ \sigma   τ \tau   φ \phi   ψ \psi   ω \omega   Ω \Omega
ℝ \mathbb{R}   ℤ \mathbb{Z}   ℕ \mathbb{N}   ℚ \mathbb{Q}   ℂ \mathbb{C}
⁄∕ /   −–—‐‑ -   ′’‘ '   “” "   。 .   、 ,   ∶： :
"""


def _read_characters() -> dict[str, str]:
    """Return the LaTeX of each character; a command ends in a space, as a letter may follow it."""
    latex_of = {"℃": r"^\circ C"}
    words = _CHARACTERS.split()
    for characters, latex in zip(words[::2], words[1::2], strict=True):
        if latex[-1].isalpha():
            latex += " "
        latex_of |= dict.fromkeys(characters, latex)
    return latex_of


SIGNS = _read_characters()
_GREEK_NAMES = (
    "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega|pi"
)
TOKEN = rf"(?:\{{([^{{}}]*)\}}|(\d|[a-zA-Z]|\\(?:{_GREEK_NAMES})(?![a-zA-Z])))"

# The name of a command ends in front of (?![a-zA-Z]).
_ESCAPED_TWICE = (
    r"(?<!\\)\\(?=\\(?:[dt]?frac|text|sqrt|boxed|le|ge|times|cdot|pi|infty)"
    r"(?![a-zA-Z]))"
)
_ANY_SIGN = f"[{''.join(SIGNS)}]"
_NOT_ASCII = r"[^\x00-\x7f]+"
_VULGAR_FRACTION = "[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]"
_SUPERSCRIPT = "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+"
_SUBSCRIPT = "[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+"
_ROOT_SIGN = r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))"
_INNER_BOX = r"\\(?:boxed|fbox)\s*\{([^{}]*)\}"
_FORMULA_MARK = r"(?:(?<!\\)(?:\\[\[\]()]|\$)\s*)+"
_BRACE_COMMAND = r"\\([lr])brace(?![a-zA-Z])"
_ANGLE = r"\\([lr])angle(?![a-zA-Z])"
_SIZE = r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?"
_STYLE = (
    r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|[lL]arge)(?![a-zA-Z])\s*"
)
_COLOUR = r"\\(?:text)?color\s*\{[^{}]*\}"
_ALIGNMENT_MARK = r"&\s*(?==)"
_EQUATIONS = r"\\begin\{(cases|aligned|split|gathered)\}([^&]*?)\\end\{\1\}"
_SIZED_FRACTION = r"\\[dtc]frac(?![a-zA-Z])"
_BARE_FRACTION = rf"\\(frac)\s*{TOKEN}\s*{TOKEN}"
_BARE_BINOMIAL = rf"\\[dt]?(binom)\s*{TOKEN}\s*{TOKEN}"
_ROOT_OF = rf"(\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|(?!\{{){TOKEN})"
_BARE_ROOT = rf"\\sqrt\s*(\[\w+\])?\s*{_ROOT_OF}"
_CHOOSE = r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"
_BARE_SET = r"\\mathbb\s+([A-Z])"
_FONT = r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|bm|boldsymbol)\s*(?=\{)"
_NUMBER_IN_TEXT = r"\\text\{([^{}^*/]*\d[^{}^*/]*)\}"
_CURRENCY_IN_TEXT = r"\\text\{\s*(\\\$|[€£¥₹¢])\s*\}"
_OPTION_AND_TEXT = r"\\text\{\s*(\(?[A-J][).:])\s+([^{}]+)\}"
_CONSTANT_IN_TEXT = r"\\text\{\s*([ei])\s*\}"
# Units: several \text joined by signs, one \text with signs inside, a fraction, parentheses.
_GAP = r"(?:\\[,;: ]|~|\s)*"
_POWER = r"(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))"
_UNIT = rf"\\text\{{[^{{}}]*\}}\s*{_POWER}?"
_PRODUCT_OF_UNITS = (
    rf"(?:{_UNIT}\s*(?:/|\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z]))\s*)+{_UNIT}"
)
_UNIT_WITH_SIGNS = (
    r"\\text(?=\{)\{((?:[^{}]|\{-?\d\})*(?:\^|\\cdot|\\[,;: ]|\\(?:Omega|mu))"
    r"(?:[^{}]|\{-?\d\})*)\}"
)
_FRACTION_OF_UNITS = rf"\\frac\{{\s*({_UNIT})\s*\}}\{{\s*({_UNIT})\s*\}}"
_OHM = rf"(?<=\d){_GAP}\\Omega\s*$"
_MICRO = r"\\mu\s*\\text\{\s*"
_METRES = r"(?<=[0-9])\s*([kcdm]?m)([²³])"
_LINE_END = r"\\+\s*$"


def _plain_characters(match: Match) -> str:
    text = unicodedata.normalize("NFKC", match[0])
    return re.sub(r"\d", lambda digit: str(unicodedata.digit(digit[0])), text)


def _vulgar_fraction(match: Match) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return command("frac", top, bottom)


def _power_of_metres(match: Match) -> str:
    return rf"\text{{ {match[1]}}}^{{{unicodedata.digit(match[2])}}}"


def _script(sign: str) -> Replacement:
    return lambda match: f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}"


def _sign(match: Match) -> str:
    return SIGNS[match[0]]


def _brace(match: Match) -> str:
    return {"l": r"\{", "r": r"\}"}[match[1]]


def _parenthesis(match: Match) -> str:
    return {"l": "(", "r": ")"}[match[1]]


def _equations(match: Match) -> str:
    return match[2].replace(r"\\", ", ")


def _root(match: Match) -> str:
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return command("sqrt" + degree, match[2] or match[3] or match[4])


def _fraction(match: Match) -> str:
    top, bottom = match[2] or match[3], match[4] or match[5]
    if not top or not bottom:  # empty braces
        return match[0]
    return command(match[1], top, bottom)


def _one_text(match: Match) -> str:
    r"""Write a unit in one \text without braces inside: \text{kg*m/s^2}."""
    unit = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", "*", match[0])
    unit = unit.replace(r"\Omega", "ohm").replace(r"\mu", "mu")
    unit = re.sub(r"\\[,;: ]", " ", _without_text(unit))
    return command("text", unit)


def _quotient_of_units(match: Match) -> str:
    top, bottom = _without_text(match[1]).strip(), _without_text(match[2]).strip()
    return command("text", f"{top}/{bottom}")


def _without_text(unit: str) -> str:
    return re.sub(r"\\text|[{}]", "", unit)


# Scripts leave a minus sign, which is made a plain one with the other signs.
LAYOUT = (
    rule(r"\\frac{1}{2} -> \frac{1}{2}", "math-verify's tests", _ESCAPED_TWICE, ""),
    rule(r"2½ -> 2\frac{1}{2}", "½", _VULGAR_FRACTION, _vulgar_fraction),
    rule(r"5m² -> 5\text{ m}^{2}", "math-verify's tests", _METRES, _power_of_metres),
    rule("x² -> x^{2}", "superscripts", _SUPERSCRIPT, _script("^")),
    rule("52₈ -> 52_{8}", "base in Unicode", _SUBSCRIPT, _script("_")),
    rule(
        r"x ≤ −3 -> x \le -3",
        "degree sign",
        _ANY_SIGN,
        _sign,
    ),
    rule("３４ -> 34", "full-width digits", _NOT_ASCII, _plain_characters),
    rule(r"2√14 -> 2\sqrt{14}", "√", _ROOT_SIGN, _root),
    rule(r"\boxed{7} -> 7", "DeepScaleR", _INNER_BOX, r"\1"),
    rule("$x$ -> x", "formula marks in the box", _FORMULA_MARK, " "),
    rule(r"\left( 2, 3 \right) -> ( 2, 3 )", "braces of a maximum", _SIZE, ""),
    rule(
        r"\lbrace 1 \rbrace -> \{ 1 \}",
        "\\lbrace",
        _BRACE_COMMAND,
        _brace,
    ),
    rule(
        r"\langle 1, 2\rangle -> ( 1, 2)",
        "\\langle",
        _ANGLE,
        _parenthesis,
    ),
    rule(r"\displaystyle 7 -> 7", "\\displaystyle", _STYLE, ""),
    rule(r"\textcolor{red}{7} -> {7}", "colour", _COLOUR, ""),
    rule("x&=2 -> x=2", "math-verify's tests", _ALIGNMENT_MARK, ""),
    rule(
        r"\begin{cases}x=2\\y=3\end{cases} -> x=2, y=3",
        "cases",
        _EQUATIONS,
        _equations,
    ),
    rule(
        r"\dfrac{3}{4} -> \frac{3}{4}",
        "percent sign added to a fraction",
        _SIZED_FRACTION,
        r"\\frac",
    ),
    rule(
        r"\frac34 -> \frac{3}{4}", "fraction without braces", _BARE_FRACTION, _fraction
    ),
    rule(r"\sqrt[3]\pi -> \sqrt[3]{\pi}", "DeepScaleR", _BARE_ROOT, r"\\sqrt\1{\2}"),
    rule(
        r"\binom94 -> \binom{9}{4}",
        "binomial without braces",
        _BARE_BINOMIAL,
        _fraction,
    ),
    rule(
        r"\mathbb R -> \mathbb{R}",
        "\\mathbb R",
        _BARE_SET,
        r"\\mathbb{\1}",
    ),
    rule(r"{10 \choose 3} -> \binom{10}{3}", "\\choose", _CHOOSE, r"\\binom{\1}{\2}"),
    rule(r"\mathrm{east} -> \text{east}", "word with \\text", _FONT, r"\\text"),
    rule(
        r"\text{(A) The cat} -> \text{(A)} \text{The cat}",
        "option with its text",
        _OPTION_AND_TEXT,
        r"\\text{\1} \\text{\2}",
    ),
    rule(r"\text{\$}5 -> \$5", "currency in \\text", _CURRENCY_IN_TEXT, r"\1"),
    rule(r"3\mathrm{i} -> 3 i", "math-verify's tests", _CONSTANT_IN_TEXT, r" \1 "),
    rule(
        r"5\mathrm{m\,s^{-2}} -> 5\text{m s^-2}",
        "unit in one \\mathrm",
        _UNIT_WITH_SIGNS,
        _one_text,
    ),
    rule(
        r"5\text{ km} / \text{h} -> 5\text{ km / h}",
        "DeepScaleR",
        _PRODUCT_OF_UNITS,
        _one_text,
    ),
    rule(
        r"5\frac{\text{m}}{\text{s}} -> 5\text{m/s}",
        "fraction of units",
        _FRACTION_OF_UNITS,
        _quotient_of_units,
    ),
    rule(r"\text{24 hours} -> 24 hours", "DeepScaleR", _NUMBER_IN_TEXT, r" \1 "),
    rule(r"5\mu \text{m} -> 5\text{mum}", "micro", _MICRO, r"\\text{mu"),
    rule(r"5\Omega -> 5\text{ ohm}", "ohm", _OHM, r"\\text{ ohm}"),
    rule(r"7 \\ -> 7", "line end in the box", _LINE_END, ""),
)
