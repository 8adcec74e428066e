"""Characters, LaTeX and groups of digits that mean the same: the first half of the table of
`verify.spelling`.

Each row says what is written, what becomes of it and why the rule is there; then come its pattern
and the replacement. In patterns the name of a command ends in front of (?![a-zA-Z]).
"""

import re
import unicodedata
from collections.abc import Callable, Mapping
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


def spelling_rules(
    *rows: tuple[str, str, str, Replacement],
) -> tuple[SpellingRule, ...]:
    """Make rules of rows: example, evidence, pattern, replacement."""
    return tuple(
        SpellingRule(example, evidence, re.compile(pattern), replacement)
        for example, evidence, pattern, replacement in rows
    )


def command(name: str, *arguments: object) -> str:
    r"""Return a LaTeX command: `command("frac", 1, 2)` is \frac{1}{2}."""
    return f"\\{name}" + "".join(f"{{{argument}}}" for argument in arguments)


def matched_group(match: Match) -> str:
    """Return the text of the alternative that matched, of several with one group each."""
    return next(filter(None, match.groups()))


def looked_up(table: Mapping[str, str]) -> Replacement:
    """Return a replacement that finds in the table what becomes of the group that matched."""
    return lambda match: table[matched_group(match)]


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

_ROOT_OF = rf"(\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|(?!\{{){TOKEN})"
# Units: several \text joined by signs, one \text with signs inside, a fraction, parentheses.
_GAP = r"(?:\\[,;: ]|~|\s)*"
_POWER = r"(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))"
_UNIT = rf"\\text\{{[^{{}}]*\}}\s*{_POWER}?"

# Between the groups of the digits of a number.
_SPACE = (
    r"(?:(?<!\\)\\[,;:! ]|~|\\thinspace(?![a-zA-Z])|\{(?:\\[,;:! ]| )?\}"
    r"|[ \u00a0\u2009\u202f])"
)
_BRACED_COMMA = r"(?:(?:\\mathord|\\text)?\{,\}|,\s*\\!)"


def _plain_characters(match: Match) -> str:
    """Write full-width letters and foreign digits as plain ones: ３４ as 34."""
    text = unicodedata.normalize("NFKC", match[0])
    return re.sub(r"\d", lambda digit: str(unicodedata.digit(digit[0])), text)


def _vulgar_fraction(match: Match) -> str:
    r"""Write ½ as \frac{1}{2}."""
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return command("frac", top, bottom)


def _power_of_metres(match: Match) -> str:
    r"""Write m² as \text{ m}^{2}."""
    return rf"\text{{ {match[1]}}}^{{{unicodedata.digit(match[2])}}}"


def _script(sign: str) -> Replacement:
    """Return a replacement that writes ² as ^{2}, for the sign ^, or ₂ as _{2}, for the sign _."""
    return lambda match: f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}"


def _equations(match: Match) -> str:
    """Write the lines of `cases`, `aligned` and the like as a list."""
    return match[2].replace(r"\\", ", ")


def _root(match: Match) -> str:
    r"""Write √2, √(2), √{2} as \sqrt{2}, and ∛2 as \sqrt[3]{2}."""
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return command("sqrt" + degree, match[2] or match[3] or match[4])


def _fraction(match: Match) -> str:
    r"""Write \frac34 as \frac{3}{4}, and \binom94 as \binom{9}{4}."""
    # Each `TOKEN` has two groups, of which one matches: what is in braces, or a lone sign.
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
    r"""Write \frac{\text{m}}{\text{s}} as \text{m/s}."""
    top, bottom = _without_text(match[1]).strip(), _without_text(match[2]).strip()
    return command("text", f"{top}/{bottom}")


def _without_text(unit: str) -> str:
    r"""Return a unit without `\text` and braces."""
    return re.sub(r"\\text|[{}]", "", unit)


def _joined(match: Match) -> str:
    """Return the digits of a number without the marks between its groups."""
    return re.sub(r"[^\d.]", "", match[0])


def _joined_outside_brackets(match: Match) -> str:
    """Join the groups of 1,234, but not of (1,234), which is two numbers."""
    before = match.string[: match.start()]
    for opening, closing in ("()", "[]", (r"\{", r"\}")):
        if before.count(opening) > before.count(closing):
            return match[0]
    return _joined(match)


# Scripts leave a minus sign, which is made a plain one with the other signs.
LAYOUT = spelling_rules(
    (
        r"\\frac{1}{2} -> \frac{1}{2}",
        "math-verify's tests",
        r"(?<!\\)\\(?=\\(?:[dt]?frac|text|sqrt|boxed|le|ge|times|cdot|pi|infty)"
        r"(?![a-zA-Z]))",
        "",
    ),
    (r"2½ -> 2\frac{1}{2}", "½", "[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", _vulgar_fraction),
    (
        r"5m² -> 5\text{ m}^{2}",
        "math-verify's tests",
        r"(?<=[0-9])\s*([kcdm]?m)([²³])",
        _power_of_metres,
    ),
    ("x² -> x^{2}", "superscripts", "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", _script("^")),
    ("52₈ -> 52_{8}", "base in Unicode", "[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+", _script("_")),
    (r"x ≤ −3 -> x \le -3", "degree sign", f"([{''.join(SIGNS)}])", looked_up(SIGNS)),
    ("３４ -> 34", "full-width digits", r"[^\x00-\x7f]+", _plain_characters),
    (
        r"2√14 -> 2\sqrt{14}",
        "√",
        r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))",
        _root,
    ),
    (r"\boxed{7} -> 7", "DeepScaleR", r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r"\1"),
    ("$x$ -> x", "formula marks in the box", r"(?:(?<!\\)(?:\\[\[\]()]|\$)\s*)+", " "),
    (
        r"\left( 2, 3 \right) -> ( 2, 3 )",
        "braces of a maximum",
        r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?",
        "",
    ),
    (
        r"\lbrace 1 \rbrace -> \{ 1 \}",
        "\\lbrace",
        r"\\([lr])brace(?![a-zA-Z])",
        looked_up({"l": r"\{", "r": r"\}"}),
    ),
    (
        r"\langle 1, 2\rangle -> ( 1, 2)",
        "\\langle",
        r"\\([lr])angle(?![a-zA-Z])",
        looked_up({"l": "(", "r": ")"}),
    ),
    (
        r"\displaystyle 7 -> 7",
        "\\displaystyle",
        r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|[lL]arge)(?![a-zA-Z])\s*",
        "",
    ),
    (r"\textcolor{red}{7} -> {7}", "colour", r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    ("x&=2 -> x=2", "math-verify's tests", r"&\s*(?==)", ""),
    (
        r"\begin{cases}x=2\\y=3\end{cases} -> x=2, y=3",
        "cases",
        r"\\begin\{(cases|aligned|split|gathered)\}([^&]*?)\\end\{\1\}",
        _equations,
    ),
    (
        r"\dfrac{3}{4} -> \frac{3}{4}",
        "percent sign added to a fraction",
        r"\\[dtc]frac(?![a-zA-Z])",
        r"\\frac",
    ),
    (
        r"\frac34 -> \frac{3}{4}",
        "fraction without braces",
        rf"\\(frac)\s*{TOKEN}\s*{TOKEN}",
        _fraction,
    ),
    (
        r"\sqrt[3]\pi -> \sqrt[3]{\pi}",
        "DeepScaleR",
        rf"\\sqrt\s*(\[\w+\])?\s*{_ROOT_OF}",
        r"\\sqrt\1{\2}",
    ),
    (
        r"\binom94 -> \binom{9}{4}",
        "binomial without braces",
        rf"\\[dt]?(binom)\s*{TOKEN}\s*{TOKEN}",
        _fraction,
    ),
    (r"\mathbb R -> \mathbb{R}", "\\mathbb R", r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
    (
        r"{10 \choose 3} -> \binom{10}{3}",
        "\\choose",
        r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}",
        r"\\binom{\1}{\2}",
    ),
    (
        r"\mathrm{east} -> \text{east}",
        "word with \\text",
        r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|bm|boldsymbol)\s*(?=\{)",
        r"\\text",
    ),
    (
        r"\text{(A) The cat} -> \text{(A)} \text{The cat}",
        "option with its text",
        r"\\text\{\s*(\(?[A-J][).:])\s+([^{}]+)\}",
        r"\\text{\1} \\text{\2}",
    ),
    (
        r"\text{\$}5 -> \$5",
        "currency in \\text",
        r"\\text\{\s*(\\\$|[€£¥₹¢])\s*\}",
        r"\1",
    ),
    (r"3\mathrm{i} -> 3 i", "math-verify's tests", r"\\text\{\s*([ei])\s*\}", r" \1 "),
    (
        r"5\mathrm{m\,s^{-2}} -> 5\text{m s^-2}",
        "unit in one \\mathrm",
        r"\\text(?=\{)\{((?:[^{}]|\{-?\d\})*(?:\^|\\cdot|\\[,;: ]|\\(?:Omega|mu))"
        r"(?:[^{}]|\{-?\d\})*)\}",
        _one_text,
    ),
    (
        r"5\text{ km} / \text{h} -> 5\text{ km / h}",
        "DeepScaleR",
        rf"(?:{_UNIT}\s*(?:/|\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z]))\s*)+{_UNIT}",
        _one_text,
    ),
    (
        r"5\frac{\text{m}}{\text{s}} -> 5\text{m/s}",
        "fraction of units",
        rf"\\frac\{{\s*({_UNIT})\s*\}}\{{\s*({_UNIT})\s*\}}",
        _quotient_of_units,
    ),
    (
        r"\text{24 hours} -> 24 hours",
        "DeepScaleR",
        r"\\text\{([^{}^*/]*\d[^{}^*/]*)\}",
        r" \1 ",
    ),
    (r"5\mu \text{m} -> 5\text{mum}", "micro", r"\\mu\s*\\text\{\s*", r"\\text{mu"),
    (r"5\Omega -> 5\text{ ohm}", "ohm", rf"(?<=\d){_GAP}\\Omega\s*$", r"\\text{ ohm}"),
    (r"7 \\ -> 7", "line end in the box", r"\\+\s*$", ""),
    (
        r"10\,000 -> 10000",
        "groups 1\\,234",
        rf"(?<![\d.])[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?!\d)",
        _joined,
    ),
    (
        "1{,}234 -> 1234",
        "math-verify's tests",
        rf"(?<![\d.])[1-9]\d{{0,2}}(?:{_BRACED_COMMA}\s*\d{{3}})+(?!\d)",
        _joined,
    ),
    (
        "1,234 -> 1234",
        "groups of three and one more",
        r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])",
        _joined_outside_brackets,
    ),
)
