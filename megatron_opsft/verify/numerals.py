"""Numbers as answers write them: fractions, decimals, words, clock times, durations, bases."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

Number = Fraction | Decimal
"""An exact number; or a decimal as it is written, without zeros at its end: it may be rounded."""

_MAX_DIGITS = 4000  # of a number that is read here; powers of ten up to 10^4000
# A fraction, perhaps with a whole number in front; 12/3 is not 1 and 2/3.
_FRACTION = (
    r"(?:(?P<whole>\d+)\s*)?\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\}"
    r"|(?:(?P<slash_whole>\d+)\s+)?(?P<slash_top>\d+)\s*/\s*(?P<slash_bottom>\d+)"
)
_DECIMAL = r"(?P<digits>\d+\.?\d*|\.\d+)(?:\s*\\cdot 10\^\{(?P<power>-?\d+)\})?"
_NUMBER = re.compile(rf"(?P<minus>-?)\s*(?:{_FRACTION})|(?P<sign>[-+]?)\s*{_DECIMAL}")
_CLOCK = re.compile(
    r"(?:at\s+)?(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?)?"
    r"\s*\(?(?:(?P<half>[ap])\s*\.?\s*m\s*\.?"
    r"|(?P<afternoon>noon|in the afternoon|in the evening)"
    r"|(?P<morning>midnight|in the morning)|o'?clock)?\)?",
    re.IGNORECASE,
)
_DURATION_PART = (
    r"(\d+(?:\.\d+)?)\s*(days?|hours?|hrs?|h|minutes?|mins?|seconds?|secs?|s)\.?"
)
_DURATION = re.compile(rf"{_DURATION_PART}(?:\s*,?\s*{_DURATION_PART})*")
# Seconds of a unit of time, by its first letter.
_SECONDS = {
    "d": 86400,
    "h": 3600,
    "m": 60,
    "s": 1,
}
# A numeral that begins with a letter has two digits or more: A_{12} is a name.
_DIGITS = r"(?P<digits>[0-9][0-9A-Za-z]*|[A-Z][0-9A-Z]+)"
_NUMERAL = re.compile(
    rf"(?P<minus>-?)[({{]?(?P<inner_minus>-?)(?:\\text\{{)?{_DIGITS}\}}?\)?\s*(?:"
    r"_\s*\{?\s*(?:\\text\{)?\s*\(?(?:base\s*)?(?P<subscript>\w+?)\)?\s*\}*"
    r"|\(?\s*(?:\\text\{)?\s*,?\s*\(?\s*(?:in\s+)?base[\s-]*\}?\s*(?P<base>\w+)\)?\s*\}?)"
)
_NUMBER_WORDS = re.compile(
    r"(?P<minus>minus|negative|-)?\s*(?P<words>[a-z][a-z\s,-]*)\.?"
)
# In words, from 0 to 19, and the tens.
_BELOW_TWENTY = """
zero one two three four five six seven eight nine
ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def _name_numbers() -> dict[str, int]:
    """Return the whole numbers below a thousand by their English names, without "and"."""
    below_hundred = _BELOW_TWENTY.split()
    digits = below_hundred[1:10]
    for ten in _TENS.split():
        below_hundred += [ten, *(f"{ten} {digit}" for digit in digits)]
    names = list(below_hundred)
    for digit in digits:
        names.append(f"{digit} hundred")
        names += [f"{digit} hundred {name}" for name in below_hundred[1:]]
    return {name: value for value, name in enumerate(names)}


_NUMBERS_BY_NAME = _name_numbers()


class ClockTime(NamedTuple):
    """A time of day, such as 5:30 p.m."""

    seconds: int
    """Seconds since midnight or noon."""
    half: str
    """"a" or "p", for a.m. and p.m.; "" if the answer does not say which half of the day."""


class Duration(NamedTuple):
    """A length of time, such as 2 hours 30 minutes."""

    seconds: Fraction
    num_units: int
    """How many units the answer names: hours and minutes are two."""


class Numeral(NamedTuple):
    """A number that is written in a named base, such as 1F_{16}."""

    digits: str
    """The digits, letters in upper case, without zeros in front; perhaps with a minus."""
    base: int


def unwrapped(text: str) -> str:
    r"""Return the text with the content of each `\text{...}` in place of it, stripped."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()


def read_number(body: str) -> Number | None:
    """Read an integer, decimal, fraction or mixed number; None for anything else."""
    match = _NUMBER.fullmatch(body)
    if match is None:
        return None
    if match["digits"] is not None:
        power = int(match["power"] or 0)
        if max(abs(power), len(match["digits"])) > _MAX_DIGITS:
            return None
        return as_number(match["sign"] + match["digits"], power)
    if len(body) > _MAX_DIGITS:  # before `int`, which refuses thousands of digits
        return None
    bottom = int(match["bottom"] or match["slash_bottom"])
    if bottom == 0:
        return None
    top = int(match["top"] or match["slash_top"])
    value = int(match["whole"] or match["slash_whole"] or 0) + Fraction(top, bottom)
    return -value if match["minus"] else value


def as_number(text: str, power: int = 0) -> Number:
    """Return the integer or decimal times a power of ten; trailing zeros are ignored."""
    whole, _, decimals = text.partition(".")
    if decimals := decimals.rstrip("0"):
        return Decimal(f"{whole}.{decimals}e{power}")
    if not whole.strip("+-"):  # "-.0"
        whole = "0"
    return int(whole) * Fraction(10) ** power


def read_words(text: str) -> int | None:
    """Read a number below a thousand in words: twelve, twenty-five, minus one hundred and six. None
    for anything else.
    """
    match = _NUMBER_WORDS.fullmatch(unwrapped(text.lower()))
    if match is None:
        return None
    value = _NUMBERS_BY_NAME.get(" ".join(re.findall("[a-z]+", match["words"])))
    if value is not None and match["minus"]:
        return -value
    return value


def read_clock(body: str) -> ClockTime | None:
    """Read a time of day; None for anything else."""
    text = unwrapped(body)
    if text.lower() in ("noon", "midnight"):
        text = f"12 {text}"
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    hour = int(match["hour"])
    is_hour_alone = not any(match.groups()[1:])
    if hour > 24 or is_hour_alone:
        return None
    if match["half"]:
        half = match["half"].lower()
    elif match["afternoon"] or (12 < hour < 24 and not match["morning"]):
        half = "p"
    elif match["morning"] or hour == 24 or match["hour"].startswith("0"):
        half = "a"
    else:
        half = ""
    minutes = 60 * (hour % 12) + int(match["minute"] or 0)
    return ClockTime(minutes * 60 + int(match["second"] or 0), half)


def read_duration(body: str) -> Duration | None:
    """Read a duration, such as 2 hours 30 minutes or 2.5 hours; None for anything else, and for one
    that names a unit twice.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", body).strip()
    if not _DURATION.fullmatch(text):
        return None
    amounts = {}
    for amount, name in re.findall(_DURATION_PART, text):
        letter = name[0]
        if letter in amounts:
            return None
        amounts[letter] = Fraction(amount) * _SECONDS[letter]
    return Duration(sum(amounts.values(), Fraction()), len(amounts))


def read_base(body: str) -> Numeral | None:
    """Read a numeral that names its base; None for anything else."""
    match = _NUMERAL.fullmatch(body)
    if match is None:
        return None
    name = (match["subscript"] or match["base"]).lower()
    base = int(name) if name.isdecimal() else _NUMBERS_BY_NAME.get(name, 0)
    if not 2 <= base <= 36:
        return None
    digits = match["digits"].upper()
    if any(int(digit, 36) >= base for digit in digits if digit.isalpha()):
        return None
    digits = digits.lstrip("0") or "0"
    return Numeral(match["minus"] + match["inner_minus"] + digits, base)
