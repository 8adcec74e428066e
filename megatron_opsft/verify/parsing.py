"""What math-verify's parser reads in the whole of a text: a number, formula, relation or set."""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from math_verify.grader import should_treat_as_complex

from megatron_opsft.verify.numerals import read_number

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
_BRACKET_OR_COMMA = re.compile(r"[()\[\]{},]")
_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]")
_REMAINDER = re.compile(r"\(?\\pmod\{(\w+)\}\)?")  # in 17 mod 5 = 2
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
# What the parser takes for something else: I for the imaginary unit, gamma for Euler's number, f'
# for f, and a common divisor of letters for 1. Other commands and texts are only stepped over.
_MISREAD = re.compile(
    r"\\(?P<divisor>gcd|lcm)\s*(?=\([^()]*[a-zA-Z])|\\(?P<greek>gamma|Gamma)(?![a-zA-Z]|\s*\()"
    r"|(?P<function>[a-zA-Z])(?P<primes>'+)|(?P<letter>I)|\\text\{[^{}]*\}|\\[a-zA-Z]+"
)


@lru_cache(maxsize=4096)
def values_of(body: str) -> tuple[Any, ...]:
    """The value of the whole of `body`, as the only member; () where the parser reads none."""
    if (number := read_number(body)) is not None:
        return (_as_sympy(number),)
    if _NOT_ONE_VALUE.search(body) or _is_too_large(body):
        return ()
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
        return ()
    return () if value is None or isinstance(value, str) else (value,)


def _is_too_large(body: str) -> bool:
    if len(body) > _MAX_CHARS or body.count(r"\cup") > _MAX_UNIONS:
        return True
    if body.count(",") > _MAX_MEMBERS:
        return True
    depth = deepest = 0
    for match in _BRACKET_OR_COMMA.finditer(body):
        if match[0] != ",":
            depth += 1 if match[0] in "([{" else -1
            deepest = max(deepest, depth)
    return deepest > _MAX_DEPTH


def split_at_commas(text: str) -> list[str]:
    """The parts between commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for match in _BRACKET_OR_COMMA.finditer(text):
        if match[0] == ",":
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        else:
            depth += 1 if match[0] in "([{" else -1
    return [*parts, text[start:]]


def _as_sympy(number: Decimal | Fraction) -> Any:
    value = sympy.Rational(*Fraction(number).as_integer_ratio())
    if isinstance(number, Decimal):
        return sympy.Float(value, max(15, len(number.as_tuple().digits)))
    return value


def _with_names(body: str) -> str:
    r"""The text with what the parser misreads as names; I of a complex number stays: 2+3I."""
    letters = {match[0] for match in _LETTER.finditer(body) if len(match[0]) == 1}
    is_complex_number = letters == {"I"} and not _RELATION.search(body)

    def named(match: re.Match[str]) -> str:
        if match["letter"] and is_complex_number:
            return match[0]
        if match["function"]:
            return rf"\text{{{match['function']}{'prime' * len(match['primes'])}}}"
        name = (
            match["divisor"]
            or match["letter"]
            or (match["greek"] and f"letter {match['greek']}")
        )
        return rf"\text{{{name}}}" if name else match[0]

    return _MISREAD.sub(named, body)


def _with_both_signs(body: str) -> str:
    r"""A list with each member that has a \pm, such as (\pm 3, 0), in all its signs."""
    if not 0 < len(_PLUS_MINUS.findall(body)) <= _MAX_SIGNS:
        return body
    inner = body[2:-2] if body.startswith(r"\{") and body.endswith(r"\}") else body
    members = []
    for member in split_at_commas(inner):
        first, *others = _PLUS_MINUS.split(member)
        for signs in product("+-", repeat=len(others)):
            signed = [sign + part for sign, part in zip(signs, others, strict=True)]
            members.append("".join([first, *signed]))
    return ",".join(members)
