"""What an answer says beside its mathematics: option letter, unit, clock time, number base, words.

Pure text; `verify.equality` compares the mathematics of what is left. Whatever is not understood
makes an answer unreadable: it then equals the same text only, never a part of itself.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from megatron_opsft.verify.spelling import respell


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEASURES = """
mm millimeter millimetre | cm centimeter centimetre 厘米 | dm decimeter | m meter metre 米
km kilometer kilometre | in inch inche | ft foot feet | yd yard | mi mile | mg milligram
g gram gramme | kg kilogram kilo | lb pound | oz ounce | ton tonne | ml milliliter millilitre
l liter litre | gal gallon | s sec second | min minute | h hr hour | day | week wk | month
year yr | mph mile/h mi/h mile/hour | km/h kmh kmph | rad radian | $ dollar usd buck us\\$
cent ¢ | € euro eur | £ gbp | ¥ yuan rmb 元 | rs rupee ₹ inr | unit | sq square | cu cubic cube
hz hertz | n newton | j joule | w watt | v volt | a ampere | k kelvin | celsius
"""
_UNITS = {
    name: names.split()[0] for names in re.split(r"[|\n]", _MEASURES) for name in names.split()
}
_SIGNS = {"%", "°", *_UNITS.values()}
_LONE_LETTER_UNITS = "mgshLlVNJWAKCF"
_FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt max min gcd lcm"
    " mod det frac pi"
)
# Words that change a value or join two: text with one of them is no unit.
_NO_UNITS = _words(
    "not no more less than least most greater fewer larger smaller between except times plus minus"
    " over under above below about dozen half third quarter all any every none each if for when"
    " where unless until or and from to at is are was be other both either neither only"
)
_OPTION = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\\text\{\s*\(?([A-J])\)?\s*[.:)]?\s*\}|\(\s*(?:\\text\{)?([A-J])\}?\s*\)"
    r"(?=\s|$)|([A-J])(?:[.):](?=\s|$)|$))\s*",
    re.IGNORECASE,
)
_SAYS_MORE = re.compile(r"\b(?:is|isn|wrong|incorrect)\b")
_BARE_WORDS = re.compile(
    r"\\text\{[^{}]*\}|(?<![\\A-Za-z_^{])((?:[A-Za-z]{2,}|[^\x00-\u03ff\W\d_]+)\.?(?:[\s/-]+[A-Za-z]+\.?)*)"
)
_UNIT = re.compile(
    r"\\text\{([^{}]*)\}\s*(?:\^\s*(?:\{(\d)\}|(\d)))?"
    r"|(\\\$|[€£¥₹]|(?<![a-zA-Z])(?:US|USD|EUR|Rs)(?:\\\$|\.?\s*(?=\d)))|\\(%)|\^(\\circ)"
)
_CLOCK = re.compile(
    r"(\d{1,2})(?::([0-5]\d)(?::([0-5]\d))?)?\s*(?:([ap])\s*\.?\s*m\s*\.?|(noon|midnight)|o'?clock)?",
    re.IGNORECASE,
)
_BASE = re.compile(
    r"(-?)(?:\\text\{)?([0-9][0-9A-Za-z]*)\}?\s*(?:_\s*\{?\s*(?:\\text\{)?\s*\(?(?:base\s*)?(\w+?)\)?"
    r"\s*\}*|(?:\\text\{)?\s*,?\s*\(?\s*(?:in\s+)?base[\s-]*\}?\s*(\w+)\)?\s*\}?)"
)
_BASE_NAMES = {
    name: base
    for base, name in enumerate(
        [
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
        ],
        start=2,
    )
}
_PRODUCT = re.compile("[abckmnpqrtuvwxyz]{2,3}")
_LABEL = re.compile(
    r"\\text\{[^{}\d]*\}\s*(?:=|:(?!\d))\s*"
    r"|(?:\\text\{\s*)?(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\s*[:=]?\s*\}?\s*",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?P<sign>-?)\s*(?:(?P<whole>\d+)\s*)?(?:\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\}"
    r"|(?P<slash>\d+)\s*/\s*(?P<under>\d+))"
    r"|(?P<minus>[-+]?)\s*(?P<digits>\d+\.?\d*|\.\d+)(?:\s*\\cdot 10\^\{(?P<power>-?\d+)\})?"
)
_MAX_DIGITS = 4000  # of a number that is read here; powers of ten up to 10^4000


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read as far as text goes.

    text: as respelled; `body`: without option letter, label and unit; `unit`: the words of its
    unit, empty without one; `readable`: whether `body` may be read as mathematics.
    """

    text: str
    option: str
    body: str
    unit: tuple[str, ...]
    readable: bool


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number as it is written. Of a decimal also `digits`, how many are significant, and `last`,
    what its last digit counts in; 0 for exact forms.
    """

    value: Fraction
    digits: int = 0
    last: Fraction = Fraction(0)


def read(text: str) -> Answer:
    """The answer in what a box holds, or in a gold answer."""
    text = respell(text)
    rest = _without_outer_brackets(text)
    if label := _LABEL.match(rest):
        rest = rest[label.end() :]
    option = ""
    match = _OPTION.match(rest)
    if match and not re.match(r"[,;:+*/^_=<>]|-\s", rest[match.end() :]):
        letter = next(filter(None, match.groups()))
        behind = rest[match.end() :]
        if letter.isupper() or not behind:  # (a) 5 may be a product
            option, rest = letter.upper(), behind
    body, unit, readable = _take_unit(rest)
    if option and _SAYS_MORE.search(body):
        readable = False
    return Answer(
        text=text,
        option=option,
        body=_without_outer_brackets(body),
        unit=unit,
        readable=readable,
    )


def _without_outer_brackets(text: str) -> str:
    """Without braces around all of it, and without parentheses around one number."""
    if number := re.fullmatch(r"\(\s*(-?[\d./]+)\s*\)", text):
        return number[1]
    while text.startswith("{") and text.endswith("}"):
        depth = 0
        for position, char in enumerate(text):
            depth += (char == "{") - (char == "}")
            if depth == 0 and position < len(text) - 1:
                return text
        text = text[1:-1].strip()
    return text


def _take_unit(text: str) -> tuple[str, tuple[str, ...], bool]:
    """The text without its unit, the unit, and whether all words in it were understood."""
    if is_words(text) or read_clock(text) or read_base(text):
        return text, (), True
    found: list[tuple[str, ...]] = []
    readable = True

    def take(match: re.Match[str]) -> str:
        nonlocal readable
        words, square, cube, currency, percent, degree = match.groups()
        if words is None:
            sign = (currency or "").strip(". ").lower()
            found.append(("%" if percent else "°" if degree else _UNITS.get(sign, "$"),))
            return " "
        unit = _name_unit(words, square or cube or "")
        if unit is None or not match.string[: match.start()].strip(" ({["):
            readable = False
            return match[0]
        found.append(unit)
        return " "

    body = _BARE_WORDS.sub(_wrap_words, text)
    body = re.sub(
        r"(?<=[\d}])\^\{(?:\\text\{)?\s*(?:st|nd|rd|th)\s*\}+|(?<=\d)(?:st|nd|rd|th)\b", "", body
    )
    body = _UNIT.sub(take, body)
    if "'" in body or '"' in body:
        readable = False
    units = set(found)
    if len(units) == 2:  # a 25% increase, $5 a ticket
        units = {unit for unit in units if unit[0] in _SIGNS} if len(found) == 2 else units
    if len(units) > 1 or (len(found) > 2 and not re.search(r"[,:<]|\\le", body)):
        return text, (), False
    return " ".join(body.split()), next(iter(units), ()), readable


def _wrap_words(match: re.Match[str]) -> str:
    """Words without `\\text` get it, but for letters that may be a product, and functions."""
    if match[1] is None:
        return match[0]
    words = re.findall(r"[^\W\d_]+", match[1])
    if words[0].lower() in _FUNCTIONS:
        return match[0]
    is_text = any(
        len(word) >= 4 or _singular(word) in _UNITS or not word.isascii() for word in words
    ) or (len(words) > 1 and any(len(word) == 3 for word in words))
    return rf"\text{{{match[1]}}}" if is_text else match[0]


def _name_unit(words: str, power: str) -> tuple[str, ...] | None:
    """The words of a unit, measures in their short form; None for text that is none."""
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", words.replace("-", " "))
    if re.search(r"[^\w\s./$]|\d", words):
        return None
    names = words.split()
    if not names or any(_singular(name) in _NO_UNITS for name in names):
        return None
    names = ["/".join(_short(part) for part in name.split("/")) for name in names]
    names = [_UNITS.get(name, name) for name in names]
    if names[-1] in ("squared", "cubed") and len(names) > 1:
        power = "2" if names.pop() == "squared" else "3"
    if names[0] in ("sq", "cu") and len(names) > 1:
        power = "2" if names.pop(0) == "sq" else "3"
    return (*names[:-1], names[-1] + power)


def _short(name: str) -> str:
    for word in (name.strip("."), _singular(name)):
        if len(word) > 1 and word.lower() in _UNITS or word in _UNITS:
            return _UNITS.get(word.lower(), word)
    return _singular(name)


def _singular(word: str) -> str:
    word = word.strip(".")
    word = word.lower() if len(word) > 1 else word
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def units_agree(left: Answer, right: Answer) -> bool:
    """Whether the units are the same, or one side has none. Of things that are counted one side may
    say less: "apples" and "red apples".
    """
    a, b = set(left.unit), set(right.unit)
    if not a or not b or a == b:
        return True
    if {name.rstrip("23") for name in a | b} & _SIGNS:
        return a | b == {"°", "celsius"}
    return a <= b or b <= a


def is_words(text: str) -> bool:
    """Whether the text is words and nothing else: a name, yes, a direction, AB."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.fullmatch(r"[^\W\d_]{2,}[.!]?(?:[\s,\-]+[^\W\d_]+[.!]?)*", bare) is not None and not (
        set(bare.lower().split()) & _FUNCTIONS
    )


def plain(text: str) -> str:
    """For comparison as text: without wrappers and spaces that mean nothing; words without case."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s*([^\w\s\\]|\\(?=[^a-zA-Z]))\s*", r"\1", " ".join(text.split()))
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    return text.casefold() if "\\" not in text and is_words(text) else text


def same_words(left: str, right: str) -> bool:
    """Words by their letters; a product of letters of algebra, such as abc, in any order."""
    if _PRODUCT.fullmatch(left) and _PRODUCT.fullmatch(right):
        return sorted(left) == sorted(right)
    return plain(left) == plain(right)


def read_number(body: str) -> Numeral | None:
    """An integer, decimal, fraction or mixed number; None for anything else."""
    match = _NUMBER.fullmatch(body)
    if match is None:
        return None
    if match["digits"] is not None:
        power = int(match["power"] or 0)
        if max(abs(power), len(match["digits"])) > _MAX_DIGITS:
            return None
        return numeral(match["minus"] + match["digits"], power)
    top, bottom = match["top"] or match["slash"], int(match["bottom"] or match["under"])
    joined = match["whole"] and match["slash"] and not re.search(r"\d\s+\d", body)
    if bottom == 0 or joined or len(body) > _MAX_DIGITS:  # joined: 12/3 is not 1 and 2/3
        return None
    value = int(match["whole"] or 0) + Fraction(int(top), bottom)
    return Numeral(-value if match["sign"] else value)


def numeral(text: str, power: int = 0) -> Numeral:
    """An integer or a decimal, times a power of ten; zeros at its end say nothing."""
    scale = Fraction(10) ** power
    whole, _, decimals = text.partition(".")
    decimals = decimals.rstrip("0")
    if not decimals:
        return Numeral(int(whole + "0") // 10 * scale if whole.strip("+-") else Fraction(0))
    digits = len((whole.strip("+-") + decimals).lstrip("0"))
    value = Fraction(f"{whole if whole.strip('+-') else whole + '0'}.{decimals}") * scale
    return Numeral(value, digits, scale / 10 ** len(decimals))


def read_clock(body: str) -> tuple[int, str] | None:
    """(seconds into half a day, "a", "p" or ""): "" where it is not said which half."""
    match = _CLOCK.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", body).strip())
    if match is None or int(match[1]) > 24 or not (match[2] or match[4] or match[5]):
        return None
    hour, half = int(match[1]), (match[4] or "").lower()
    if match[5]:
        half = "p" if match[5].lower() == "noon" else "a"
    if not half and (hour > 12 or hour == 0):
        half = "p" if 12 < hour < 24 else "a"
    return (hour % 12 * 60 + int(match[2] or 0)) * 60 + int(match[3] or 0), half


def read_base(body: str) -> tuple[str, int] | None:
    """(digits, base) of a numeral that names its base; None for anything else."""
    match = _BASE.fullmatch(body)
    if match is None:
        return None
    name = (match[3] or match[4]).lower()
    base = _BASE_NAMES.get(name) or (int(name) if name.isdecimal() else 0)
    digits = match[2].upper()
    if not 2 <= base <= 36 or any(int(d, 36) >= base for d in digits if d.isalpha()):
        return None
    if base != 16 and match[2] != digits:
        return None  # 2a_{12} is a product
    return match[1] + (digits.lstrip("0") or "0"), base


def with_letter_as_unit(answer: Answer) -> Answer | None:
    """`5 m` with its letter as a unit and not as a variable; None where there is none."""
    match = re.fullmatch(rf"(.*[\d}})])\s+([{_LONE_LETTER_UNITS}])", answer.body)
    if match is None or answer.unit:
        return None
    return Answer(
        text=answer.text,
        option=answer.option,
        body=match[1],
        unit=(_UNITS.get(match[2].lower(), match[2]),),
        readable=answer.readable,
    )
