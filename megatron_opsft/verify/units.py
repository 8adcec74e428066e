"""The units of answers: measures, currencies, percent, degrees, and nouns that are counted."""

import re
from typing import NamedTuple

Unit = tuple[str, ...]
"""The factors of a unit, measures in their short form: ("m", "s-2") of m/s^2; () for no unit."""


def _words(text: str) -> frozenset[str]:
    """Return the words of a text, which spaces separate."""
    return frozenset(text.split())


# The names of a unit, its short form first.
_MEASURES = """
mm millimeter millimetre | cm centimeter centimetre 厘米 | dm decimeter | m meter metre 米
km kilometer kilometre | in inch inche | ft foot feet | yd yard | mi mile | mg milligram
g gram gramme | kg kilogram kilo | lb pound | oz ounce | ton tonne | ml milliliter millilitre
l L liter litre | gal gallon | s sec second | min minute | h hr hour | day | week wk | month
year yr | rad radian | $ dollar usd buck us\\$
cent ¢ | € euro eur | £ gbp | ¥ yuan rmb 元 | rs rupee ₹ inr | unit | sq square | cu cubic cube
hz hertz | n N newton | j J joule | w W watt | v V volt | a ampere | K kelvin | celsius | ohm
"""


def _read_measures() -> dict[str, str]:
    """Return the short form of each name of a measure."""
    short_forms = {}
    for line in re.split(r"[|\n]", _MEASURES):
        names = line.split()
        for name in names:
            short_forms[name] = names[0]
    return short_forms


_SHORT_FORMS = _read_measures()
_SPEEDS = {
    "mph": "mi/h",
    "kmh": "km/h",
    "kph": "km/h",
    "kmph": "km/h",
}
_MEASURED_UNITS = {"%", "°", *_SHORT_FORMS.values()}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_POWERS = _POWERS_BEHIND | {
    "square": 2,
    "sq": 2,
    "cubic": 3,
    "cu": 3,
    "cube": 3,
}
_CURRENCIES = _words("$ cent € £ ¥ rs")
_LONE_LETTER_UNITS = "mgshLlVNJWAKCF"
FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt max min gcd lcm"
    " mod det frac pi"
)
# Words that change a value or join two: text with one of them is not a unit.
_NO_UNITS = _words(
    "not no more less than least most greater fewer larger smaller between except plus minus"
    " over under above below about dozen half third quarter all any every none each if for when"
    " where unless until or and from to at is are was be other both either neither only"
    " factorial inverse twice double triple fail halve tenth hundredth thousandth fifth sixth"
    " seventh eighth ninth ten lakh crore wrong roughly approximately negative k gross score grand"
    " M B mil mn bn couple doubled tripled halved inverted negated tens hundred thousand"
    " million billion trillion set 万 亿 千 百"
)
_BARE_WORDS = re.compile(
    r"\\text\{[^{}]*\}"
    r"|(?<![\\A-Za-z_^{])((?:[A-Za-z]{2,}|[^\x00-\u03ff\W\d_]+)\.?(?:[\s/-]+[A-Za-z]+\.?)*)"
)
_COMPOUND_WORD = re.compile(  # a 6-digit number
    r"\d-(?:\\text\{)?(?:[a-z]{4,}|[a-z]{3}\s+[a-z]{3})"
)
_ORDINAL = re.compile(
    r"(?<=[\d}])\^\{(?:\\text\{)?\s*(?:st|nd|rd|th)\s*\}+|(?<=\d)(?:st|nd|rd|th)\b"
)
_UNIT = re.compile(
    r"\\text\{(?P<words>[^{}]*)\}\s*(?:\^\s*(?:\{(?P<braced_power>-?\d)\}|(?P<power>-?\d)))?"
    r"|(?P<currency>\\\$|\\pounds|[€£¥₹¢₩]|(?<![a-zA-Z])(?:US|USD|EUR|Rs)(?:\\\$|\.?\s*(?=\d)))"
    r"|\\(?P<percent>%)|\^(?P<degree>\\circ)"
)
# A quote that is no prime behind a letter, as in f'(x): a sign that nothing here reads.
_QUOTE = re.compile(r"(?<![a-zA-Z'])'|\"")
_UNIT_IN_PARENTHESES = re.compile(
    r"(?<=[\d}])\s*\(\s*((?:\\text\{[^{}]*\}(?:\^\{?-?\d\}?)?\s*)|\\%)\s*\)"
)
_FACTOR = re.compile(
    r"\s*(?P<per>/|\bper\b)?\s*(?P<opens>\()?(?P<name>[^\W\d_]+|[$€£¥₹¢])\.?"
    r"(?:\s*\^?(?P<power>-?\d))?(?P<closes>\))?"
)


class Quantity(NamedTuple):
    """An answer taken apart into its value and its unit."""

    body: str
    """The text without its unit."""
    unit: Unit = ()
    readable: bool = True
    """False if the text holds words that were not understood."""


def take_unit(text: str) -> Quantity:
    """Take the unit out of a text. One with several different units stays whole, as unreadable."""
    unreadable = Quantity(text, readable=False)
    if _COMPOUND_WORD.search(text):
        return unreadable
    text = _ORDINAL.sub("", _BARE_WORDS.sub(_wrap_words, text))
    text = _UNIT_IN_PARENTHESES.sub(r" \1 ", text)
    # The body is what lies between the units; words that are no unit stay in it.
    body, end = "", 0
    units = []
    readable = True
    for match in _UNIT.finditer(text):
        unit = _read_unit(match)
        if unit is None:
            readable = False
        else:
            units.append(unit)
            body += text[end : match.start()] + " "
            end = match.end()
    body += text[end:]
    if _QUOTE.search(body):
        readable = False
    different = set(units)
    # Of a measure and a counted noun the measure is the unit: a 25% increase, $5 a ticket.
    if len(different) == len(units) == 2:
        different = {unit for unit in units if unit[0] in _MEASURED_UNITS}
    is_list = re.search(r"[,:<]|\\le", body)
    if len(different) > 1 or (len(units) > 2 and not is_list):
        return unreadable
    return Quantity(" ".join(body.split()), next(iter(different), ()), readable)


def _read_unit(match: re.Match[str]) -> Unit | None:
    """Read a match of `_UNIT`; None for words that are no unit, and for a unit in front of a number
    that is no currency.
    """
    if match["percent"]:
        return ("%",)
    if match["degree"]:
        return ("°",)
    if match["currency"]:
        return (_SHORT_FORMS.get(match["currency"].strip(". ").lower(), "$"),)
    unit = _name_unit(match["words"], match["braced_power"] or match["power"] or "1")
    before = match.string[: match.start()]
    is_thousand = match["words"] == "K" and before[-1:].isdigit()  # 5K; 300 K is kelvin
    if unit is None or is_thousand:
        return None
    is_in_front = not before.strip(" ({[")
    return None if is_in_front and unit[0] not in _CURRENCIES else unit


def _wrap_words(match: re.Match[str]) -> str:
    r"""Put `\text` around words, but not around functions, and letters that may be a product."""
    if match[1] is None:
        return match[0]
    words = re.findall(r"[^\W\d_]+", match[1])
    if words[0].lower() in FUNCTIONS or not _looks_like_prose(words):
        return match[0]
    return rf"\text{{{match[1]}}}"


def _looks_like_prose(words: list[str]) -> bool:
    """True for words of a language, such as apples, km, 厘米 and red hat; not for abc, which may be
    a product.
    """
    for word in words:
        if len(word) >= 4 or singular(word) in _SHORT_FORMS or not word.isascii():
            return True
    return len(words) > 1 and any(len(word) == 3 for word in words)


def _name_unit(words: str, power: str) -> Unit | None:
    """Return the factors of a unit, ("km", "h-1") of km/h; None for text that is no unit, such as
    "times more".

    power: the exponent behind the words, which belongs to the last factor.
    """
    words = re.sub(r"[a-z]+", lambda match: _SPEEDS.get(match[0], match[0]), words)
    words = words.replace("*", " ")
    if "^" not in words:  # a hyphen then joins words; else it may be an exponent's sign
        words = words.replace("-", " ")
    if _FACTOR.sub("", words).strip(" ().,"):
        return None
    names, exponents = [], []
    is_below = False
    for match in _FACTOR.finditer(words):
        if _changes_value(match["name"]):
            return None
        exponent = int(match["power"] or 1)
        if match["per"] or is_below:
            exponent = -exponent
        names.append(match["name"])
        exponents.append(exponent)
        # m/(s kg): all factors are below the stroke until the parenthesis closes.
        if match["closes"]:
            is_below = False
        elif match["per"] and match["opens"]:
            is_below = True
    if not names or "times" in names[:-1]:  # "times more" multiplies
        return None
    # Powers of nothing: "squared", "square cubic".
    powers = [name for name in names if name.lower() in _POWERS]
    if names in (["squared"], ["cubed"]) or (len(names) > 1 and powers == names):
        return None
    exponents[-1] *= int(power)
    return _with_powers(names, exponents)


def _changes_value(name: str) -> bool:
    """True for a word or sign that makes another number: dozen, M for a million."""
    if len(name) == 1:
        return name in _NO_UNITS
    return bool({name.lower(), singular(name)} & _NO_UNITS)


def _with_powers(names: list[str], exponents: list[int]) -> Unit:
    """Return the factors; words such as square and cubed are powers: ("m", "s-2") of metres per
    second squared. A last "square" or "cube" is a unit itself.
    """
    factors: list[tuple[str, int]] = []
    # What a word such as "square" says of the unit that follows; `is_below`: behind "per".
    power, is_below = 1, False
    for index, (name, exponent) in enumerate(zip(names, exponents, strict=True)):
        word = name.lower()
        if factors and word in _POWERS_BEHIND:
            unit, so_far = factors[-1]
            factors[-1] = unit, so_far * _POWERS_BEHIND[word]
        elif index < len(names) - 1 and word in _POWERS:
            power, is_below = _POWERS[word], exponent < 0  # per cubic metre
        else:
            sign = -1 if is_below and exponent > 0 else 1
            factors.append((_short_form(name), sign * exponent * power))
            power, is_below = 1, False
    return tuple(
        unit if exponent == 1 else f"{unit}{exponent}" for unit, exponent in factors
    )


def _short_form(name: str) -> str:
    """Return m of metres or Meter, and the singular of a name that is no measure: apple."""
    as_written = name.lower() if len(name) > 1 else name
    in_singular = singular(name)
    return _SHORT_FORMS.get(as_written, _SHORT_FORMS.get(in_singular, in_singular))


def singular(word: str) -> str:
    """Return an English word in the singular, in lower case; a single letter as it is."""
    word = word.strip(".")
    if len(word) > 1:
        word = word.lower()
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def units_agree(gold: Unit, answer: Unit) -> bool:
    """True if the units are the same, or one side has none. One side may name less of what is
    counted: "apples" and "red apples".
    """
    gold_factors, answer_factors = set(gold), set(answer)
    if not gold or not answer or gold_factors == answer_factors:
        return True
    factors = gold_factors | answer_factors
    if {factor.rstrip("-0123456789") for factor in factors} & _MEASURED_UNITS:
        return factors == {"°", "celsius"}
    return gold_factors <= answer_factors or answer_factors <= gold_factors


def letter_as_unit(body: str, unit: Unit) -> Quantity | None:
    """Read `5 m` as 5 with the unit m: `take_unit` cannot know that m is no variable. Also `5m`, if
    m is `unit`, the unit of the other side. None for anything else.
    """
    match = re.fullmatch(
        rf"(?P<value>.*[\d}})])(?P<space>\s*)(?P<letter>[{_LONE_LETTER_UNITS}])"
        r"(?:\^\{?(?P<power>[23])\}?)?",
        body,
    )
    if match is None:
        return None
    letter = _SHORT_FORMS.get(match["letter"].lower(), match["letter"])
    read_unit = (letter + (match["power"] or ""),)
    if match["space"] or read_unit == unit:
        return Quantity(match["value"], read_unit)
    return None
