"""The units of answers: measures, currencies, percent, degrees, and things that are counted."""

import re

Unit = tuple[
    str, ...
]  # its factors, measures in their short form, m/s^2: (m, s-2); () without one


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEASURES = """
mm millimeter millimetre | cm centimeter centimetre 厘米 | dm decimeter | m meter metre 米
km kilometer kilometre | in inch inche | ft foot feet | yd yard | mi mile | mg milligram
g gram gramme | kg kilogram kilo | lb pound | oz ounce | ton tonne | ml milliliter millilitre
l L liter litre | gal gallon | s sec second | min minute | h hr hour | day | week wk | month
year yr | rad radian | $ dollar usd buck us\\$
cent ¢ | € euro eur | £ gbp | ¥ yuan rmb 元 | rs rupee ₹ inr | unit | sq square | cu cubic cube
hz hertz | n N newton | j J joule | w W watt | v V volt | a ampere | K kelvin | celsius | ohm
"""
_UNITS = {
    name: names.split()[0]
    for names in re.split(r"[|\n]", _MEASURES)
    for name in names.split()
}
_SPEEDS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h"}
_SIGNS = {"%", "°", *_UNITS.values()}
_POWERS = {
    "squared": 2,
    "cubed": 3,
    "square": 2,
    "sq": 2,
    "cubic": 3,
    "cu": 3,
    "cube": 3,
}
_CURRENCIES = ("$", "cent", "€", "£", "¥", "rs")
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
_COMPOUND_WORD = re.compile(
    r"\d-(?:\\text\{)?(?:[a-z]{4,}|[a-z]{3}\s+[a-z]{3})"
)  # a 6-digit number
_ORDINAL = re.compile(
    r"(?<=[\d}])\^\{(?:\\text\{)?\s*(?:st|nd|rd|th)\s*\}+|(?<=\d)(?:st|nd|rd|th)\b"
)
_UNIT = re.compile(
    r"\\text\{([^{}]*)\}\s*(?:\^\s*(?:\{(-?\d)\}|(-?\d)))?"
    r"|(\\\$|\\pounds|[€£¥₹¢₩]|(?<![a-zA-Z])(?:US|USD|EUR|Rs)(?:\\\$|\.?\s*(?=\d)))"
    r"|\\(%)|\^(\\circ)"
)
_UNIT_IN_PARENTHESES = re.compile(
    r"(?<=[\d}])\s*\(\s*((?:\\text\{[^{}]*\}(?:\^\{?-?\d\}?)?\s*)|\\%)\s*\)"
)
_FACTOR = re.compile(
    r"\s*(?P<per>/|\bper\b)?\s*(?P<opens>\()?(?P<name>[^\W\d_]+|[$€£¥₹¢])\.?"
    r"(?:\s*\^?(?P<power>-?\d))?(?P<closes>\))?"
)


def take_unit(text: str) -> tuple[str, Unit, bool]:
    """The text without its unit, the unit, and whether all words in it were understood."""
    found: list[Unit] = []
    readable = True

    def take(match: re.Match[str]) -> str:
        nonlocal readable
        words, square, cube, currency, percent, degree = match.groups()
        if words is None:
            sign = (currency or "").strip(". ").lower()
            found.append(
                ("%" if percent else "°" if degree else _UNITS.get(sign, "$"),)
            )
            return " "
        unit = _name_unit(words, square or cube or "")
        before = match.string[: match.start()]
        if (
            words == "K" and before[-1:].isdigit()
        ):  # 5K is five thousand, 300 K a temperature
            unit = None
        in_front = not before.strip(" ({[")
        if unit is None or (in_front and unit[0] not in _CURRENCIES):
            readable = False
            return match[0]
        found.append(unit)
        return " "

    if _COMPOUND_WORD.search(text):
        return text, (), False
    body = _ORDINAL.sub("", _BARE_WORDS.sub(_wrap_words, text))
    body = _UNIT.sub(take, _UNIT_IN_PARENTHESES.sub(r" \1 ", body))
    if re.search(r"(?<![a-zA-Z'])'|\"", body):  # but for the primes of f'(x)
        readable = False
    units = set(found)
    if len(units) == 2:  # a 25% increase, $5 a ticket
        units = (
            {unit for unit in units if unit[0] in _SIGNS} if len(found) == 2 else units
        )
    if len(units) > 1 or (len(found) > 2 and not re.search(r"[,:<]|\\le", body)):
        return text, (), False
    return " ".join(body.split()), next(iter(units), ()), readable


def _wrap_words(match: re.Match[str]) -> str:
    r"""Words without `\text` get it, but for letters that may be a product, and functions: a word
    has four letters, or three beside another word, or it is a unit.
    """
    if match[1] is None:
        return match[0]
    words = re.findall(r"[^\W\d_]+", match[1])
    if words[0].lower() in FUNCTIONS:
        return match[0]
    is_text = any(
        len(word) >= 4 or singular(word) in _UNITS or not word.isascii()
        for word in words
    ) or (len(words) > 1 and any(len(word) == 3 for word in words))
    return rf"\text{{{match[1]}}}" if is_text else match[0]


def _name_unit(words: str, power: str) -> Unit | None:
    """The factors of a unit, measures in their short form; None for text that is none."""
    words = re.sub(r"[a-z]+", lambda match: _SPEEDS.get(match[0], match[0]), words)
    words = words.replace("*", " ")
    words = words if "^" in words else words.replace("-", " ")
    factors: list[tuple[str, int]] = []
    end, is_below = 0, False
    for match in _FACTOR.finditer(words):
        name = match["name"]
        if words[end : match.start()].strip(" ().,") or _changes_value(name):
            return None
        exponent = int(match["power"] or 1) * (-1 if match["per"] or is_below else 1)
        factors.append((name, exponent))
        is_below = not match["closes"] and (
            is_below or bool(match["per"] and match["opens"])
        )
        end = match.end()
    names = [name for name, _ in factors]
    if not names or words[end:].strip(" ().,") or "times" in names[:-1]:
        return None
    if names in (["squared"], ["cubed"]):
        return None
    return _with_powers(factors, power)


def _changes_value(name: str) -> bool:
    """Whether it is a word or sign that makes another number: dozen, M for a million."""
    if len(name) == 1:
        return name in _NO_UNITS
    return bool({name.lower(), singular(name)} & _NO_UNITS)


def _with_powers(factors: list[tuple[str, int]], power: str) -> Unit:
    """The factors with the powers that stand beside them in words: square metres, metres cubed."""
    if power:
        name, exponent = factors[-1]
        factors[-1] = name, exponent * int(power)
    named: list[str] = []
    pending = 1
    for index, (name, exponent) in enumerate(factors):
        word = _POWERS.get(name.lower(), 0) if len(factors) > 1 else 0
        if word and index and name.lower() in ("squared", "cubed"):
            named[-1] += str(word)
        elif word and index < len(factors) - 1:
            pending = word
        else:
            exponent, pending = exponent * pending, 1
            named.append(_short(name) + (str(exponent) if exponent != 1 else ""))
    return tuple(named)


def _short(name: str) -> str:
    for word in (name.strip("."), singular(name)):
        if len(word) > 1 and word.lower() in _UNITS or word in _UNITS:
            return _UNITS.get(word.lower(), word) if len(word) > 1 else _UNITS[word]
    return singular(name)


def singular(word: str) -> str:
    """An English word in the singular, in lower case; a single letter as it is."""
    word = word.strip(".")
    word = word.lower() if len(word) > 1 else word
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def units_agree(left: Unit, right: Unit) -> bool:
    """Whether the units are the same, or one side has none. One side may name less of what is
    counted: "apples" and "red apples".
    """
    a, b = set(left), set(right)
    if not a or not b or a == b:
        return True
    if {name.rstrip("-0123456789") for name in a | b} & _SIGNS:
        return a | b == {"°", "celsius"}
    return a <= b or b <= a


def letter_as_unit(body: str, unit: Unit) -> tuple[str, Unit] | None:
    """`5 m` as (5, m): take_unit cannot know whether m is a variable. Also `5m`, where m is the
    unit of the other side. None for anything else.
    """
    match = re.fullmatch(
        rf"(.*[\d}})])(\s*)([{_LONE_LETTER_UNITS}])(?:\^\{{?([23])\}}?)?", body
    )
    if match is None:
        return None
    found = (_UNITS.get(match[3].lower(), match[3]) + (match[4] or ""),)
    return (match[1], found) if match[2] or found == unit else None
