"""One spelling for one answer: gold answers and answers are rewritten to it before they are read.

`respell` applies the rules of `TABLE` from top to bottom. Each row says what people write, what
becomes of it, and why it is there. No rule drops anything that can change the value: words, units
and signs that no rule knows are still there for `verify.reading`.
"""

import re

from megatron_opsft.verify.layout import (
    LAYOUT,
    Match,
    command,
    looked_up,
    matched_group,
    spelling_rules,
)

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_RADIX = {"x": 16, "o": 8, "b": 2}
_ARGUMENT = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
_CIRCLE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_DEGREES = rf"(\d+(?:\.\d+)?)\s*{_CIRCLE}"


def _word(pattern: str) -> str:
    r"""Return the pattern of a word, with `\text` around it or without."""
    return (
        rf"(?:\\text\{{\s*(?:{pattern})\s*\}}|(?<![\\a-zA-Z])(?:{pattern})(?![a-zA-Z]))"
    )


_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_TIMES_TEN = r"(?:(?:x|X|\*|\\times|\\cdot|\\ast|\\text\{\s*[xX]\s*\})\s*10|\(10\))"
_PERIOD = r"(?:\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))|\((\d+)\))"
_SCALE_NAMES = "|".join(SCALES)
_BRACKETING_FUNCTION = (
    rf"(?<![\\a-zA-Z])([sS]qrt|[aA]bs|floor|ceil(?:ing)?)\s*{_ARGUMENT}"
)
# The groups of the alternatives end in their number: a name may occur once in a pattern.
_CHOICE = r"(?:\\text\{\s*)?(?P<kind%s>[CPA])\s*\}?"
_COMBINATIONS = (
    r"(?<![a-zA-Z\d\\])(?:n?(?P<kind1>[CP])r?\(\s*(?P<total1>\d+)\s*,\s*(?P<chosen1>\d+)\s*\)"
    rf"|(?:\{{\s*\}})?[\^_]\s*\{{?(?P<total2>\d+)\}}?\s*{_CHOICE % 2}_\s*\{{?(?P<chosen2>\d+)\}}?"
    r"|(?P<total3>\d+)\s*(?P<kind3>choose|C)\s*(?P<chosen3>\d+)(?!\w|_)"
    rf"|{_CHOICE % 4}_\s*\{{?(?P<total4>\d+)\}}?\s*\^\s*\{{?(?P<chosen4>\d+)\}}?)"
)


def _power_of_ten(match: Match) -> str:
    r"""Write the exponent -5 as \cdot 10^{-5}."""
    power = int(matched_group(match).replace(" ", ""))
    return rf"\cdot 10^{{{power}}}"


def _repeating(match: Match) -> str:
    r"""Write 0.1\overline{6} as the fraction that it is."""
    whole, fixed, *periods = match.groups()
    period = next(filter(None, periods))
    top = int(whole + fixed + period) - int(whole + fixed or 0)
    bottom = 10 ** len(fixed) * (10 ** len(period) - 1)
    return command("frac", top, bottom)


def _program_numeral(match: Match) -> str:
    """Write 0x1F, 0o17 and 0b11 with the base behind: 1F_{16}."""
    base = _RADIX[match[1].lower()]
    return f"{match[2].upper()}_{{{base}}}"


def _scale(match: Match) -> str:
    r"""Write a million as \cdot 10^{6}."""
    return rf"\cdot 10^{{{SCALES[matched_group(match).lower()]}}} "


def _function(match: Match) -> str:
    r"""Write sin as \sin, and asin and arcsin as \arcsin."""
    inverse = "arc" if match[1] else ""
    return rf"\{inverse}{match[2]}"


def _brackets(match: Match) -> str:
    r"""Write sqrt(x), abs(x), floor(x) and ceil(x) in LaTeX; also such functions inside."""
    content = re.sub(_BRACKETING_FUNCTION, _brackets, match[2])
    match match[1].lower():
        case "sqrt":
            return command("sqrt", content)
        case "abs":
            return f"|{content}|"
        case "floor":
            return rf"\lfloor {content}\rfloor "
    return rf"\lceil {content}\rceil "


def _number_of_choices(match: Match) -> str:
    """Write a number of combinations (C, choose) or of arrangements in an order (P, A)."""
    # kind2 -> kind: each alternative of the pattern numbers its groups.
    groups = {name[:-1]: text for name, text in match.groupdict().items() if text}
    total, chosen = groups["total"], groups["chosen"]
    if groups["kind"] in "PA":
        return command("frac", f"{total}!", f"({total}-{chosen})!")
    return command("binom", total, chosen)


def _radians(match: Match) -> str:
    r"""Write the degrees in the argument of \sin and the like in radians: 30^\circ as 30\pi/180."""
    in_radians = r"\\frac{\1\\pi }{180}"
    # Parentheses around degrees that have none: \sin 30^\circ.
    text = re.sub(rf"(?<![\d.]){_DEGREES}\s*$", f"({in_radians})", match[0])
    return re.sub(_DEGREES, in_radians, text)


TABLE = LAYOUT + spelling_rules(
    # Numbers.
    (
        r"2.5e-05 -> 2.5\cdot 10^{-5}",
        "2.5e-05",
        r"(?<![a-zA-Z_\\])(?:(?<=\d)|(?<=\d\.))(?:[eE]([+-]?\d\d+)|[eE](\+\d)|E(-?\d)"
        r"|(?<=\.\d)e(-?\d)|(?<=\.\d\d)e(-?\d))(?!\w)",
        _power_of_ten,
    ),
    (
        r"2.5 x 10^-5 -> 2.5\cdot 10^{-5}",
        "scientific with x",
        rf"(?<=[\d.])\s*{_TIMES_TEN}\s*(?:\^|\*\*)\s*"
        r"(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+))",
        _power_of_ten,
    ),
    (
        r"0.1\overline{6} -> \frac{15}{90}",
        "repeating decimal",
        rf"(?<![\d.])(\d*)\.(\d*){_PERIOD}",
        _repeating,
    ),
    (
        "0x1F -> 1F_{16}",
        "0x",
        r"(?<![\w.])0([xXoObB])([0-9A-Fa-f]+)(?!\w)",
        _program_numeral,
    ),
    (
        "minus 6 -> -6",
        "minus in words",
        rf"(?i){_word('minus|negative')}\s*(?=[\d.\\(])",
        "-",
    ),
    # Spaces and synonyms.
    (r"1\!:\!2 -> 1:2", "time", r"\\!", ""),
    (
        r"1,\;2 -> 1, 2",
        "for all x of a set",
        r"(?:(?:(?<!\\)\\[,;: ]|~|\\q?quad\b|\\thinspace\b|\\enspace\b|\\hspace\{[^{}]*\})"
        r"\s*)+",
        " ",
    ),
    (
        r"x \leqslant 3 -> x \le 3",
        "DeepScaleR",
        r"\\(le|ge)(?:q|qq|qslant|slant)(?![a-zA-Z])",
        r"\\\1 ",
    ),
    (
        r"x <= 3 -> x \le 3",
        "bound as a program writes it",
        r"(?<![<=>])([<>])=",
        looked_up({"<": r"\le ", ">": r"\ge "}),
    ),
    (r"x != 3 -> x \ne 3", "DeepScaleR", r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
    (
        r"1, 2, ... -> 1, 2, \ldots",
        "DeepScaleR",
        r"\\(?:dots[cbmi]?|cdots|hdots)(?![a-zA-Z])|\.{3,}",
        r"\\ldots ",
    ),
    (
        r"0.333... -> \frac{3}{9}",
        "DeepScaleR",
        r"(?<![\d.])(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,6}?)\4+)\s*\\ldots\s*$",
        _repeating,
    ),
    (
        r"\{x \mid x>3\} -> x>3",
        "DeepScaleR",
        r"^\s*\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\vert|\||:)"
        r"((?:.*[^\\a-zA-Z])?\1(?![a-zA-Z]).*)\\\}[\s.]*$",
        r"\2",
    ),
    (
        "7{:}55 -> 7:55",
        "ratio with spaces",
        r"\\colon(?![a-zA-Z])|\\text\{\s*:\s*\}|\{:\}",
        ":",
    ),
    ("3 to 4 -> 3:4", "ratio in words", rf"(?<=\d)\s*{_word('to')}\s*(?=\d)", ":"),
    (
        r"1 \bmod 6 -> 1 \pmod{6}",
        "DeepScaleR",
        r"\(\s*(?:(?:\\b)?mod|\\(?:text|operatorname)\{\s*mod\s*\})\s*(\w+)\s*\)"
        r"|(?:\\p?mod|\\bmod|\\text\{\s*mod\s*\})\s*(?:\{\s*(\w+)\s*\}|(\w+))",
        r"\\pmod{\1\2\3}",
    ),
    ("2^4 3^2 -> 2^{4} 3^2", "DeepScaleR", r"\^(\d)\s+(?=\d)", r"^{\1} "),
    ("2**3 -> 2^3", "as a program writes it", r"\*\*", "^"),
    (r"2pi -> 2\pi", "pi in words", r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (
        r"infinity -> \infty",
        "infinity in words",
        r"(?i)(?<![\\a-zA-Z])(?:infinity|infty|inf|oo)(?![a-zA-Z])",
        r"\\infty ",
    ),
    (
        r"\text{all real numbers} -> \mathbb{R}",
        "all real numbers",
        rf"(?i){_word('all real(?:s| numbers)')}",
        r"\\mathbb{R}",
    ),
    (
        r"n_{\max }=3 -> n_{max}=3",
        "extreme as a name",
        r"_\s*(?:\{\s*(?:\\text\{\s*(max|min)\s*\}|\\(max|min))\s*\}|\\(max|min))",
        r"_{\1\2\3}",
    ),
    # Functions.
    (
        r"2 cos(x) -> 2 \cos(x)",
        "function without a backslash",
        r"(?<![\\a-zA-Z])(?<!\\text\{)(a(?:rc)?)?(sinh?|cosh?|tanh?|cot|sec|csc|ln|log|exp)"
        r"(?=\s*(?:[({_^|\d\\]|[a-zA-Z](?![a-zA-Z])|\s(?:sin|cos|tan|ln)\b))",
        _function,
    ),
    (
        r"\max\{a,b\} -> \max(a,b)",
        "braces of a maximum",
        rf"(?:\\|(?<![\\a-zA-Z]))(max|min|gcd|lcm)\s*(?:{_ARGUMENT}|\\\{{([^{{}}]*)\\\}})",
        r"\\\1(\2\3)",
    ),
    (r"sqrt(2) -> \sqrt{2}", "abs", _BRACKETING_FUNCTION, _brackets),
    (
        r"C(5,2) -> \binom{5}{2}",
        "number of choices",
        _COMBINATIONS,
        _number_of_choices,
    ),
    (
        r"\Pr(A)=1 -> P(A)=1",
        "probability in front",
        r"\\Pr(?![a-zA-Z])|\\mathbb\{P\}",
        "P",
    ),
    (
        r"\log_2 3 -> \log_{2} 3",
        "\\log_2 3",
        r"\\log\s*_\s*(\d+)\s+(?=\d)",
        r"\\log_{\1} ",
    ),
    (r"\lg 2 -> \log_{10} 2", "\\lg", r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
    (
        r"\sin(x+30^\circ) -> \sin(x+\frac{30\pi }{180})",
        "degrees in a sine",
        r"\\(?:sin|cos|tan|cot|sec|csc)(?:\^(?:\{\d\}|\d))?\s*"
        rf"(?:{_ARGUMENT}|\{{[^{{}}]*\}}|{_DEGREES})",
        _radians,
    ),
    (
        "n!^2 -> (n!)^2",
        "square of a factorial",
        r"((?<!\d)\d+!|[a-zA-Z]!)(?=\^)",
        r"(\1)",
    ),
    (
        r"3(4) -> 3\cdot (4)",
        "DeepScaleR",
        r"((?<![\w^.])(?<![_^]\{)[\d.]+|[\d)]\)|\\(?:frac|binom)\{[^{}]*\}\{[^{}]*\})"
        r"\s*(?=\([\d.]+\)|\(\\frac\{\d+\}\{\d+\}\)|\\binom)",
        r"\1\\cdot ",
    ),
    # Words for signs, and signs for units.
    (
        r"155 degrees -> 155 ^\circ",
        "degrees",
        rf"\\(?:text)?degree(?![a-zA-Z])|\\text\{{\s*\^\\circ\s*\}}|(?:\{{\}})?{_CIRCLE}"
        rf"|{_word('degrees?|deg')}",
        r"^\\circ ",
    ),
    (
        r"25°C -> 25\text{celsius}",
        "DeepScaleR",
        r"\^\\circ\s*(?:\\text\{\s*)?C(?![a-zA-Z])(?:\s*\})?",
        r"\\text{celsius}",
    ),
    (
        r"25°F -> 25\text{fahrenheit}",
        "fahrenheit",
        r"\^\\circ\s*(?:\\text\{\s*)?F(?![a-zA-Z])(?:\s*\})?",
        r"\\text{fahrenheit}",
    ),
    (
        r"5 percent -> 5 \%",
        "per cent in words",
        rf"\\?%|{_word('per ?cent(?:age)?|pct')}",
        r"\\% ",
    ),
    (
        r"5 million -> 5\cdot 10^{6}",
        "millions",
        rf"(?i)(?<=[\d}}])\s*{_word(f'({_SCALE_NAMES})s?')}",
        _scale,
    ),
    (
        r"2 \text{ and } 3 -> 2, 3",
        "list in another order",
        rf"\s*{_word(',?[ ]*(?:and|or|或|和)[ ]*,?')}|(?<=\d)(?:and|or)(?=[a-zA-Z]\()",
        ", ",
    ),
    (
        r"16'' -> 16\text{ in}",
        "sign for inches",
        r"(?<=\d)\s*(?:''|\")(?!')",
        r"\\text{ in}",
    ),
    (r"5' -> 5\text{ ft}", "sign for feet", r"(?<=\d)\s*'(?!')", r"\\text{ ft}"),
    (
        r"\approx 3 -> 3",
        "about",
        r"^\s*(?:\\approx|\\simeq|\\sim|~)(?![a-zA-Z])\s*",
        "",
    ),
    ("1, , 2 -> 1, 2", "DeepScaleR", r"\s*,(?:\s*,)+\s*", ", "),
    ("34. -> 34", "full stop in the box", r"\s*[.,;]+\s*$", ""),
)


def respell(text: str) -> str:
    """Rewrite an answer in the one spelling that `verify.reading` reads."""
    if _PLAIN_NUMBER.fullmatch(text):  # no rule has anything to do; most answers are so
        return text
    # Long runs of spaces would cost the patterns much time.
    text = " ".join(text.split())
    for spelling_rule in TABLE:
        text = spelling_rule.pattern.sub(spelling_rule.replacement, text)
    return " ".join(text.split())
