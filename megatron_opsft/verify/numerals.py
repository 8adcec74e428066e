"""Numbers, clock times and numerals in other bases, as they are written in one answer."""

import re
from dataclasses import dataclass
from fractions import Fraction

_CLOCK = re.compile(
    r"(?:at\s+)?(\d{1,2})(?::([0-5]\d)(?::([0-5]\d))?)?\s*\(?(?:([ap])\s*\.?\s*m\s*\.?"
    r"|(noon|in the afternoon|in the evening)|(midnight|in the morning)|o'?clock)?\)?",
    re.IGNORECASE,
)
_BASE = re.compile(
    r"(-?)[({]?(-?)(?:\\text\{)?([0-9][0-9A-Za-z]*)\}?\)?\s*(?:"
    r"_\s*\{?\s*(?:\\text\{)?\s*\(?(?:base\s*)?(\w+?)\)?\s*\}*"
    r"|\(?\s*(?:\\text\{)?\s*,?\s*\(?\s*(?:in\s+)?base[\s-]*\}?\s*(\w+)\)?\s*\}?)"
)
_ONES = re.findall(
    "[a-z]+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
)
_TENS = re.findall("[a-z]+", "twenty thirty forty fifty sixty seventy eighty ninety")
_TWO_DIGITS = [*_ONES, *(f"{ten} {one}" for ten in _TENS for one in ("", *_ONES[1:10]))]
_IN_WORDS = {
    f"{hundreds} {words}".strip(): 100 * count + value
    for count, hundreds in enumerate(["", *(f"{one} hundred" for one in _ONES[1:10])])
    for value, words in enumerate(["" if count else "zero", *_TWO_DIGITS[1:]])
}
_NUMBER = re.compile(
    r"(?P<sign>-?)\s*(?:(?P<whole>\d+)\s*)?(?:\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\}"
    r"|(?P<slash>\d+)\s*/\s*(?P<under>\d+))"
    r"|(?P<minus>[-+]?)\s*(?P<digits>\d+\.?\d*|\.\d+)(?:\s*\\cdot 10\^\{(?P<power>-?\d+)\})?"
)
_MAX_DIGITS = 4000  # of a number that is read here; powers of ten up to 10^4000


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number as it is written. Of a decimal also `digits`, how many are significant, and `last`,
    what its last digit counts in; 0 for exact forms.
    """

    value: Fraction
    digits: int = 0
    last: Fraction = Fraction(0)


def unwrapped(text: str) -> str:
    """What `\\text{...}` holds, without the wrapper."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()


def read_number(body: str) -> Numeral | None:
    """An integer, decimal, fraction or mixed number; None for anything else."""
    match = _NUMBER.fullmatch(body)
    if match is None:
        return None
    if match["digits"] is not None:
        power = int(match["power"] or 0)
        if max(abs(power), len(match["digits"])) > _MAX_DIGITS:
            return None
        return as_numeral(match["minus"] + match["digits"], power)
    top, bottom = match["top"] or match["slash"], int(match["bottom"] or match["under"])
    joined = match["whole"] and match["slash"] and not re.search(r"\d\s+\d", body)
    if bottom == 0 or joined or len(body) > _MAX_DIGITS:  # joined: 12/3 is not 1 and 2/3
        return None
    value = int(match["whole"] or 0) + Fraction(int(top), bottom)
    return Numeral(-value if match["sign"] else value)


def as_numeral(text: str, power: int = 0) -> Numeral:
    """An integer or a decimal, times a power of ten; zeros at its end say nothing."""
    scale = Fraction(10) ** power
    whole, _, decimals = text.partition(".")
    decimals = decimals.rstrip("0")
    value = Fraction(text if whole.strip("+-") else text.replace(".", "0.")) * scale
    if not decimals:
        return Numeral(value)
    digits = len((whole.strip("+-") + decimals).lstrip("0"))
    return Numeral(value, digits, scale / 10 ** len(decimals))


def read_clock(body: str) -> tuple[int, str] | None:
    """(seconds into half a day, "a", "p" or ""): "" where it is not said which half."""
    text = unwrapped(body)
    if text.lower() in ("noon", "midnight"):
        text = f"12 {text}"
    match = _CLOCK.fullmatch(text)
    if match is None or int(match[1]) > 24 or not any(match.groups()[1:]):
        return None
    hour, half = int(match[1]), (match[4] or "").lower()
    if match[5] or match[6]:
        half = "p" if match[5] else "a"
    if not half and (hour > 12 or match[1].startswith("0")):
        half = "p" if 12 < hour < 24 else "a"
    return (hour % 12 * 60 + int(match[2] or 0)) * 60 + int(match[3] or 0), half


def read_base(body: str) -> tuple[str, int] | None:
    """(digits, base) of a numeral that names its base; None for anything else."""
    match = _BASE.fullmatch(body)
    if match is None:
        return None
    name = (match[4] or match[5]).lower()
    base = _IN_WORDS.get(name) or (int(name) if name.isdecimal() else 0)
    digits = match[3].upper()
    if not 2 <= base <= 36 or any(int(d, 36) >= base for d in digits if d.isalpha()):
        return None
    return match[1] + match[2] + (digits.lstrip("0") or "0"), base


def read_words(text: str) -> int | None:
    """The number below a thousand in words: twelve, twenty-five, one hundred and six."""
    return _IN_WORDS.get(" ".join(re.findall("[a-z]+", unwrapped(text.lower()))))
