"""Numbers as answers write them: fractions, decimals, words, clock times, durations, bases."""

import re
from decimal import Decimal
from fractions import Fraction

# Exact; or a decimal as it is written, without zeros at its end: it may be a rounded one.
Number = Fraction | Decimal

_MAX_DIGITS = 4000  # of a number that is read here; powers of ten up to 10^4000
_FRACTION = (
    r"\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\}|(?P<slash>\d+)\s*/\s*(?P<under>\d+)"
)
_DECIMAL = r"(?P<digits>\d+\.?\d*|\.\d+)(?:\s*\\cdot 10\^\{(?P<power>-?\d+)\})?"
_NUMBER = re.compile(
    rf"(?P<sign>-?)\s*(?:(?P<whole>\d+)\s*)?(?:{_FRACTION})|(?P<minus>[-+]?)\s*{_DECIMAL}"
)
_CLOCK = re.compile(
    r"(?:at\s+)?(\d{1,2})(?::([0-5]\d)(?::([0-5]\d))?)?\s*\(?(?:([ap])\s*\.?\s*m\s*\.?"
    r"|(noon|in the afternoon|in the evening)|(midnight|in the morning)|o'?clock)?\)?",
    re.IGNORECASE,
)
_DURATION_PART = (
    r"(\d+(?:\.\d+)?)\s*(days?|hours?|hrs?|h|minutes?|mins?|seconds?|secs?|s)\.?"
)
_DURATION = re.compile(rf"{_DURATION_PART}(?:\s*,?\s*{_DURATION_PART})*")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # by the first letter of the unit
# A numeral that begins with a letter has two digits or more: A_{12} is a name.
_DIGITS = r"([0-9][0-9A-Za-z]*|[A-Z][0-9A-Z]+)"
_BASE = re.compile(
    rf"(-?)[({{]?(-?)(?:\\text\{{)?{_DIGITS}\}}?\)?\s*(?:"
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


_NUMBER_WORDS = re.compile(r"(minus|negative|-)?\s*([a-z][a-z\s,-]*)\.?")


def unwrapped(text: str) -> str:
    """What `\\text{...}` holds, without the wrapper."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()


def read_number(body: str) -> Number | None:
    """An integer, decimal, fraction or mixed number; None for anything else."""
    match = _NUMBER.fullmatch(body)
    if match is None:
        return None
    if match["digits"] is not None:
        power = int(match["power"] or 0)
        if max(abs(power), len(match["digits"])) > _MAX_DIGITS:
            return None
        return as_number(match["minus"] + match["digits"], power)
    top, bottom = match["top"] or match["slash"], int(match["bottom"] or match["under"])
    whole = match["whole"] or ""
    if whole and match["slash"] and not re.search(r"\d\s+\d", body):
        whole, top = "", whole + top  # 12/3 is not 1 and 2/3
    if bottom == 0 or len(body) > _MAX_DIGITS:
        return None
    value = int(whole or 0) + Fraction(int(top), bottom)
    return -value if match["sign"] else value


def as_number(text: str, power: int = 0) -> Number:
    """An integer or a decimal, times a power of ten; trailing zeros are ignored."""
    whole, _, decimals = text.partition(".")
    if decimals := decimals.rstrip("0"):
        return Decimal(f"{whole}.{decimals}e{power}")
    return int(whole if whole.strip("+-") else 0) * Fraction(10) ** power


def read_words(text: str) -> int | None:
    """The number below a thousand in words: twelve, twenty-five, minus one hundred and six."""
    match = _NUMBER_WORDS.fullmatch(unwrapped(text.lower()))
    if match is None:
        return None
    value = _IN_WORDS.get(" ".join(re.findall("[a-z]+", match[2])))
    return -value if value is not None and match[1] else value


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


def read_duration(body: str) -> tuple[Fraction, int] | None:
    """(seconds, how many units it names): 2 hours 30 minutes, 2.5 hours; None for anything else."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", body).strip()
    if not _DURATION.fullmatch(text):
        return None
    parts = re.findall(_DURATION_PART, text)
    names = [name[0] for _, name in parts]
    if len(set(names)) < len(names):
        return None
    return sum(
        (Fraction(count) * _SECONDS[name[0]] for count, name in parts), Fraction()
    ), len(parts)


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
