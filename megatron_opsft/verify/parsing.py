"""Mathematics as values of sympy: math-verify's parser reads a number, formula, relation or set."""

import re
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from math_verify.grader import should_treat_as_complex

from megatron_opsft.verify.layout import command
from megatron_opsft.verify.numerals import Number, read_number

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)  # R and r are two letters
_MAX_SIGNS = 4  # plus-or-minus signs in one member of a list
# The parser or sympy takes seconds for more.
_MAX_CHARS = 2000
_MAX_UNIONS = 20
_MAX_MEMBERS = 300
_MAX_DEPTH = 60  # of brackets
# 2 3, which the parser multiplies, and 12_5, of which it drops the base.
_NOT_ONE_VALUE = re.compile(r"\\ldots|\d\s+\d|\d\s*_")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_CHANGE_OF_DEPTH = {**dict.fromkeys("([{", 1), **dict.fromkeys(")]}", -1)}
_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]")
_REMAINDER = re.compile(r"\(?\\pmod\{(\w+)\}\)?")  # in 17 mod 5 = 2
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
# The parser takes I for the imaginary unit, gamma for Euler's number, f' for f, and a common
# divisor of letters for 1. Other commands and texts match only so that they are stepped over.
_MISREAD = re.compile(
    r"\\(?P<divisor>gcd|lcm)\s*(?=\([^()]*[a-zA-Z])|\\(?P<greek>gamma|Gamma)(?![a-zA-Z]|\s*\()"
    r"|(?P<function>[a-zA-Z])(?P<primes>'+)|(?P<letter>I)|\\text\{[^{}]*\}|\\[a-zA-Z]+"
)


@lru_cache(maxsize=4096)
def read_value(body: str) -> Any:
    """Read the whole of `body` as a value of sympy; None if the parser does not understand it."""
    if (number := read_number(body)) is not None:
        return _as_sympy(number)
    if _NOT_ONE_VALUE.search(body) or _is_too_large(body):
        return None
    if "=" in body and r"\equiv" not in body:
        body = _REMAINDER.sub(r" \\mod \1 ", body)
    latex = normalize_latex(_with_names(_with_both_signs(body)), _NORMALIZATION)
    is_real = not should_treat_as_complex(latex)
    try:
        value = latex2sympy(
            latex,
            is_real=is_real,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
    except Exception:  # whatever the parser raises: it does not understand the text
        return None
    return None if isinstance(value, str) else value


def _is_too_large(body: str) -> bool:
    """True if the parser or sympy could take seconds for the text."""
    return (
        len(body) > _MAX_CHARS
        or body.count(r"\cup") > _MAX_UNIONS
        or body.count(",") > _MAX_MEMBERS
        or max(_depths(body), default=0) > _MAX_DEPTH
    )


def _depths(text: str) -> list[int]:
    """Return in how many brackets each character is."""
    return list(accumulate(_CHANGE_OF_DEPTH.get(character, 0) for character in text))


def _split_at_commas(text: str) -> list[str]:
    """Split the text at the commas that are in no bracket."""
    members = [""]
    for character, depth in zip(text, _depths(text), strict=True):
        if character == "," and depth == 0:
            members.append("")
        else:
            members[-1] += character
    return members


def _as_sympy(number: Number) -> Any:
    """Return a fraction as sympy's Rational, and a decimal as a Float with all its digits."""
    value = sympy.Rational(*number.as_integer_ratio())
    if isinstance(number, Decimal):
        return sympy.Float(value, max(15, len(number.as_tuple().digits)))
    return value


def _with_names(body: str) -> str:
    r"""Write what the parser misreads as names; I of a complex number stays: 2+3I."""
    letters = {name for name in _LETTER.findall(body) if len(name) == 1}
    is_complex_number = letters == {"I"} and not _RELATION.search(body)

    def as_name(match: re.Match[str]) -> str:
        r"""Put `\text` around a match of `_MISREAD` that is misread; leave any other as it is."""
        name = match["divisor"]
        if match["function"]:
            name = match["function"] + match["primes"].replace("'", "prime")
        elif match["greek"]:
            name = f"letter {match['greek']}"
        elif match["letter"] and not is_complex_number:
            name = "I"
        return command("text", name) if name else match[0]

    return _MISREAD.sub(as_name, body)


def _with_both_signs(body: str) -> str:
    r"""Write out a list: each member that has a \pm, such as (\pm 3, 0), in all its signs."""
    if not 0 < len(_PLUS_MINUS.findall(body)) <= _MAX_SIGNS:
        return body
    if body.startswith(r"\{") and body.endswith(r"\}"):
        body = body[2:-2]
    members = []
    for member in _split_at_commas(body):
        before, *behind_signs = _PLUS_MINUS.split(member)
        for choice in product("+-", repeat=len(behind_signs)):
            signed = before
            for sign, text_behind in zip(choice, behind_signs, strict=True):
                signed += sign + text_behind
            members.append(signed)
    return ",".join(members)
