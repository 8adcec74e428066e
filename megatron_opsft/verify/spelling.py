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
    "⌈": r"\lceil ", "⌉": r"\rceil ", "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ", "≧": r"\ge ",
    "⊂": r"\subset ", "⊆": r"\subseteq ", "∖": r"\setminus ", "：": ":",
}  # fmt: skip
_GREEK = (
    "αalpha βbeta γgamma δdelta εepsilon θtheta λlambda μmu νnu ρrho σsigma τtau φphi ψpsi ωomega"
)
_SIGNS |= {word[0]: rf"\{word[1:]} " for word in _GREEK.split()}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = "|".join(_SCALES)
_RADIX = {"x": 16, "o": 8, "b": 2}
_DIGIT = re.compile(r"\d")
_END = r"(?![a-zA-Z])"  # of a command
_GREEK_NAMES = "|".join(word[1:] for word in _GREEK.split()) + "|pi"
_TOKEN = rf"(?:\{{([^{{}}]*)\}}|(\d|[a-zA-Z]|\\(?:{_GREEK_NAMES})(?![a-zA-Z])))"
_CIRCLE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_DEGREES = rf"\d+(?:\.\d+)?\s*{_CIRCLE}"
_SPACE = (
    r"(?:(?<!\\)\\[,;:! ]|~|\\thinspace(?![a-zA-Z])|\{(?:\\[,;:! ]| )?\}|[ \u00a0\u2009\u202f])"
)


def _plain_characters(match: re.Match[str]) -> str:
    text = unicodedata.normalize("NFKC", match[0])
    return _DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), text)


def _word(pattern: str) -> str:
    """The word, with `\\text` around it or without."""
    return rf"(?:\\text\{{\s*(?:{pattern})\s*\}}|(?<![\\a-zA-Z])(?:{pattern})(?![a-zA-Z]))"


def _radians(match: re.Match[str]) -> str:
    degrees = re.match(r"[\d.]+", match[2] or match[3] or match[4])
    return rf"{match[1]}(\frac{{{degrees and degrees[0]}\pi }}{{180}})"


def _vulgar_fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _script(sign: str) -> Replacement:
    return lambda match: f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}"


def _root(match: re.Match[str]) -> str:
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return rf"\sqrt{degree}{{{match[2] or match[3] or match[4]}}}"


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match[2] or match[3], match[4] or match[5]
    return rf"\{match[1]}{{{top}}}{{{bottom}}}" if top and bottom else match[0]


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


def _rule(written: str, becomes: str, pattern: str, replacement: Replacement) -> Rule:
    return Rule(written, becomes, re.compile(pattern), replacement)


# fmt: off
TABLE = (
    # Characters. Scripts leave a minus sign that is made a plain one with the other signs.
    _rule("2½", r"2\frac{1}{2}", "[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", _vulgar_fraction),
    _rule("x²", "x^{2}", "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", _script("^")),
    _rule("52₈", "52_{8}", "[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+", _script("_")),
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
    _rule(r"\bf{(C)}", r"\text{(C)}", r"\{\\(?:bf|rm|it)\s+([^{}]*)\}|\\(?:bf|rm|it)\s*\{([^{}]*)\}", lambda m: rf"\text{{{m[1] or m[2]}}}"),
    _rule(r"\displaystyle 7", "7", rf"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|[lL]arge){_END}\s*", ""),
    _rule(r"\textcolor{red}{7}", "{7}", r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    _rule(r"x&=2", "x=2", r"&\s*(?==)", ""),
    _rule(r"\begin{cases}x=2\\y=3\end{cases}", "x=2, y=3", r"\\begin\{(cases|aligned|split|gathered)\}([^&]*?)\\end\{\1\}", lambda m: m[2].replace(r"\\", ", ")),
    _rule(r"\begin{aligned}7\end{aligned}", "7", r"\\(?:begin|end)\{(?:align|aligned|split|gathered|equation)\*?\}", ""),
    _rule(r"\dfrac{3}{4}", r"\frac{3}{4}", rf"\\[dtc]frac{_END}", r"\\frac"),
    _rule(r"\frac34", r"\frac{3}{4}", rf"\\(frac)\s*{_TOKEN}\s*{_TOKEN}", _fraction),
    _rule(r"\sqrt[3]\pi", r"\sqrt[3]{\pi}", rf"\\sqrt\s*(\[\w+\])?\s*(\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|(?!\{{){_TOKEN})", r"\\sqrt\1{\2}"),
    _rule(r"x^\frac{1}{2}", r"x^{\frac{1}{2}}", r"\^\s*(\\frac\{[^{}]*\}\{[^{}]*\})", r"^{\1}"),
    _rule(r"\binom94", r"\binom{9}{4}", rf"\\[dt]?(binom)\s*{_TOKEN}\s*{_TOKEN}", _fraction),
    _rule(r"\vec a", r"\vec{a}", r"\\(vec|bar|hat|overline|text|mathrm|textbf|mathbf)\s+(\w)(?!\w)", r"\\\1{\2}"),
    _rule(r"\mathbb R", r"\mathbb{R}", r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
    _rule(r"{10 \choose 3}", r"\binom{10}{3}", r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
    _rule(r"8 \operatorname{cm}", r"8 \text{cm}", r"\\operatorname\s*(?=\{\s*(?:[mck]?m|k?g|[md]?l|ft|in|s|h|min)\s*\})", r"\\text"),
    _rule(r"\mathrm{km\,h^{-1}}", r"\text{km/h}", r"\\(?:text|mathrm)\{\s*([a-zA-Z]+)(?:\\[,;: ]|\\cdot|\s)+([a-zA-Z]+)\s*\^\s*\{?\s*-1\s*\}?\s*\}", r"\\text{\1/\2}"),
    _rule(r"\mathrm{m\,s^{-2}}", r"\text{m/s}^2", r"\\(?:text|mathrm)\{\s*([a-zA-Z]+)(?:\\[,;: ]|\\cdot|\s)+([a-zA-Z]+)\s*\^\s*\{?\s*-2\s*\}?\s*\}", r"\\text{\1/\2}^2"),
    _rule(r"\frac{\text{m}}{\text{s}}", r"\text{m/s}", r"\\frac\{\\(?:text|mathrm)\{\s*(\w+)\s*\}\}\{\\(?:text|mathrm)\{\s*(\w+)\s*\}\}", r"\\text{\1/\2}"),
    _rule(r"\mathrm{east}", r"\text{east}", r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|bm|boldsymbol)\s*(?=\{)", r"\\text"),
    _rule(r"\text{24 hours}", "24 hours", r"\\text\{([^{}]*\d[^{}]*)\}", r" \1 "),
    _rule(r"\text{\textbf{east}}", r"\text{east}", r"\\text\{\s*(\\text\{[^{}]*\})\s*\}", r"\1"),
    _rule(r"\text{\$}5", r"\$5", r"\\text\{\s*(\\\$|[€£¥₹¢])\s*\}", r"\1"),
    _rule(r"\text{Answer: D}", r"\text{D}", r"(?i)\\text\{\s*(?:the\s+)?(?:(?:final|correct)\s+)?answer\s*(?:is|[:=])+\s*(?=[^\s}])", r"\\text{"),
    _rule(r"\text{A, B}", "A, B", r"\\text\{\s*([A-Z](?:\s*,\s*[A-Z])+)\s*\}", r"\1"),
    _rule(r"3\mathrm{i}", "3 i", r"\\text\{\s*([ei])\s*\}", r" \1 "),
    _rule(r"5 (\text{cm}^2)", r"5 \text{cm}^2", r"\(\s*(\\text\{[^{}]*\}(?:\^\s*\{?\d\}?)?)\s*\)", r"\1"),
    _rule(r"\text{ km} / \text{h}", r"\text{ km/h}", r"(\\text\{[^{}]*)\}\s*/\s*\\text\{([^{}]*\})", r"\1/\2"),
    _rule(r"7 \\", "7", r"\\+\s*$", ""),
    _rule("{-}7", "-7", r"\{([+-])\}", r"\1"),
    # Numbers.
    _rule("10'000", "10000", r"(?<![\d.])[1-9]\d{0,2}(?:'\d{3})+(?!\d)", _joined),
    _rule(r"3.141\,593", "3.141593", rf"\.\d{{3}}(?:{_SPACE}\d{{3}})*{_SPACE}\d{{1,3}}(?!\d)", _joined),
    _rule(r"10\,000", "10000", rf"(?<![\d.])[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?!\d)", _joined),
    _rule("1{,}234", "1234", r"(?<![\d.])[1-9]\d{0,2}(?:(?:(?:\\mathord|\\text)?\{,\}|,\s*\\!)\s*\d{3})+(?!\d)", _joined),
    _rule("1,234", "1234", r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", _joined_outside_brackets),
    _rule("37{,}5", "37.5", r"(\d)\{,\}(\d)", r"\1.\2"),
    _rule("2.5e-05", r"2.5\cdot 10^{-5}", r"(?<![a-zA-Z_\\])(?:(?<=\d)|(?<=\d\.))(?:[eE]([+-]?\d\d+)|[eE](\+\d)|E(-?\d)|(?<=\.\d)e(-?\d)|(?<=\.\d\d)e(-?\d))(?!\w)", _power_of_ten),
    _rule("2.5 x 10^-5", r"2.5\cdot 10^{-5}", r"(?<=[\d.])\s*(?:(?:x|X|\*|\\times|\\cdot|\\ast|\\text\{\s*[xX]\s*\})\s*10|\(10\))\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+))", _power_of_ten),
    _rule(r"0.\dot{1}4285\dot{7}", r"\frac{142857}{999999}", r"\\dot(?:\{(\d)\}|(\d))(\d*)\\dot(?:\{(\d)\}|(\d))", lambda m: rf"\overline{{{''.join(filter(None, m.groups()))}}}"),
    _rule(r"0.1\overline{6}", r"\frac{15}{90}", r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))|\((\d+)\))", _repeating),
    # Spaces and synonyms.
    _rule(r"1\!:\!2", "1:2", r"\\!", ""),
    _rule(r"1,\;2", "1, 2", r"(?<!\\)\\[,;: ]|~|\\q?quad\b|\\thinspace\b|\\enspace\b|\\hspace\{[^{}]*\}", " "),
    _rule(r"x \leqslant 3", r"x \le 3", rf"\\(le|ge)(?:q|qq|qslant|slant){_END}", r"\\\1 "),
    _rule("x <= 3", r"x \le 3", r"(?<![<=>])([<>])=", lambda match: r"\le " if match[1] == "<" else r"\ge "),
    _rule("x != 3", r"x \ne 3", rf"\\neq{_END}|!=", r"\\ne "),
    _rule(r"x \lt 3", "x < 3", rf"\\([lg])t{_END}", lambda match: "<" if match[1] == "l" else ">"),
    _rule(r"1, 2, ...", r"1, 2, \ldots", rf"\\(?:dots[cbmi]?|cdots|hdots){_END}|\.{{3,}}", r"\\ldots "),
    _rule("0.333...", r"\frac{3}{9}", r"(?<![\d.])(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,6}?)\4+)\s*\\ldots\s*$", _repeating),
    _rule(r"\lbrace 1 \rbrace", r"\{ 1 \}", rf"\\([lr])brace{_END}", lambda match: r"\{" if match[1] == "l" else r"\}"),
    _rule(r"\langle 1, 2\rangle", "( 1, 2)", rf"\\([lr])angle{_END}", lambda match: "(" if match[1] == "l" else ")"),
    _rule(r"\{x \mid x>3\}", "x>3", r"^\s*\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}[\s.]*$", r"\1"),
    _rule(r"\varnothing", r"\emptyset", rf"\\varnothing{_END}", r"\\emptyset "),
    _rule(r"7{:}55", "7:55", rf"\\colon{_END}|\\text\{{\s*:\s*\}}|\{{:\}}", ":"),
    _rule("3 to 4", "3:4", rf"(?<=\d)\s*{_word('to')}\s*(?=\d)", ":"),
    _rule(r"1 \bmod 6", r"1 \pmod{6}", r"\(\s*(?:\\bmod|\\(?:text|operatorname)\{\s*mod\s*\})\s*(\w+)\s*\)|(?:\\p?mod|\\bmod|\\text\{\s*mod\s*\})\s*(?:\{\s*(\w+)\s*\}|(\w+))", lambda m: rf"\pmod{{{m[1] or m[2] or m[3]}}}"),
    _rule(r"x \times y", r"x \cdot y", rf"\\times{_END}", r"\\cdot"),
    _rule(r"\lg 2", r"\log_{10} 2", rf"\\lg{_END}", r"\\log_{10}"),
    _rule(r"\log_2 3", r"\log_{2} 3", r"\\log\s*_\s*(\d+)\s+(?=\d)", r"\\log_{\1} "),
    _rule("2^4 3^2", "2^{4} 3^2", r"\^(\d)\s+(?=\d)", r"^{\1} "),
    _rule("n!^2", "(n!)^2", r"(\d+!|[a-zA-Z]!)(?=\^)", r"(\1)"),
    _rule(r"\varepsilon", r"\epsilon", rf"\\var(epsilon|phi|theta|rho|sigma|pi|kappa){_END}", r"\\\1"),
    _rule("3(4)", r"3\cdot (4)", r"((?<![\w^.])(?<![_^]\{)[\d.]+|[\d)]\)|\\(?:frac|binom)\{[^{}]*\}\{[^{}]*\})\s*(?=\([\d.]+\)|\(\\frac\{\d+\}\{\d+\}\)|\\binom)", r"\1\\cdot "),
    _rule(r"x=k\pi, k\in\mathbb{Z}", r"x=k\pi", r"(?<=\S)[\s,(]+[kmn]\s*\\in\s*\\mathbb\s*\{?Z\}?[\s)]*$", ""),
    _rule(r"\log_e 2", r"\ln 2", r"\\log_\{?e\}?(?![a-zA-Z])", r"\\ln"),
    _rule(r"\text{empty set}", r"\emptyset", rf"(?i){_word('(?:the )?empty set')}", r"\\emptyset "),
    _rule(r"\text{all real numbers}", r"\mathbb{R}", rf"(?i){_word('all real(?:s| numbers)')}", r"\\mathbb{R}"),
    _rule("2**3", "2^3", r"\*\*", "^"),
    _rule("sqrt(2)", r"\sqrt{2}", r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    _rule("2pi", r"2\pi", rf"(?<![\\a-zA-Z])pi{_END}", r"\\pi "),
    _rule("infinity", r"\infty", rf"(?i)(?<![\\a-zA-Z])(?:infinity|infty|inf|oo){_END}", r"\\infty "),
    _rule("0x1F", "1F_{16}", r"(?<![\w.])0([xXoObB])([0-9A-Fa-f]+)(?!\w)", lambda match: f"{match[2].upper()}_{{{_RADIX[match[1].lower()]}}}"),
    # Words for signs, and signs for units.
    _rule(r"\sin 60^\circ", r"\sin(\frac{60\pi }{180})", rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^(?:\{{\d\}}|\d))?)\s*(?:\(\s*({_DEGREES})\s*\)|\{{\s*({_DEGREES})\s*\}}|({_DEGREES}))", _radians),
    _rule("155 degrees", r"155 ^\circ", rf"\\(?:text)?degree{_END}|\\text\{{\s*\^\\circ\s*\}}|(?:\{{\}})?{_CIRCLE}|{_word('degrees?|deg')}", r"^\\circ "),
    _rule("25°C", r"25\text{celsius}", rf"\^\\circ\s*(?:\\text\{{\s*)?C{_END}(?:\s*\}})?", r"\\text{celsius}"),
    _rule("25°F", r"25\text{fahrenheit}", rf"\^\\circ\s*(?:\\text\{{\s*)?F{_END}(?:\s*\}})?", r"\\text{fahrenheit}"),
    _rule("5 percent", r"5 \%", rf"\\?%|{_word('per ?cent(?:age)?|pct')}", r"\\% "),
    _rule("5 million", r"5\cdot 10^{6}", rf"(?i)(?<=[\d}}])\s*{_word(f'(?:{SCALE})s?')}", lambda match: rf"\cdot 10^{{{next(power for word, power in _SCALES.items() if word in match[0].lower())}}} "),
    _rule(r"2 \text{ and } 3", "2, 3", rf"\s*{_word(',?[ ]*(?:and|or|或|和)[ ]*,?')}", ", "),
    _rule(r"2\text{ }", "2", r"\\text\{\s*\}", " "),
    _rule('"12"', "12", r"^\s*\\?[\"'`]+(.*?)\\?[\"'`]+[.,]?\s*$", r"\1"),
    _rule("16''", r"16\text{ in}", r"(?<=\d)\s*(?:''|\")(?!')", r"\\text{ in}"),
    _rule("5'", r"5\text{ ft}", r"(?<=\d)\s*'(?!')", r"\\text{ ft}"),
    _rule(r"\approx 3", "3", rf"^\s*(?:\\approx|\\simeq|\\sim|~){_END}\s*", ""),
    _rule("= 12", "12", r"^\s*=\s*", ""),
    _rule("+5", "5", r"^\s*\+\s*(?=[\d.\\])", ""),
    _rule("1, , 2", "1, 2", r"\s*,(?:\s*,)+\s*", ", "),
    _rule("x  +  1", "x + 1", r"\s+", " "),
    _rule("34.", "34", r"\s*[.,;]+\s*$", ""),
)
# fmt: on


def respell(text: str) -> str:
    """Rewrite an answer in the one spelling that `verify.reading` reads."""
    for rule in TABLE:
        text = rule.pattern.sub(rule.replacement, text)
    return text.strip()
