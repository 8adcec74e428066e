"""The units of answers: measures, currencies, percent, degrees, and things that are counted."""

import re

Unit = tuple[str, ...]  # its words, measures in their short form; () without one


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEASURES = """
mm millimeter millimetre | cm centimeter centimetre 厘米 | dm decimeter | m meter metre 米
km kilometer kilometre | in inch inche | ft foot feet | yd yard | mi mile | mg milligram
g gram gramme | kg kilogram kilo | lb pound | oz ounce | ton tonne | ml milliliter millilitre
l L liter litre | gal gallon | s sec second | min minute | h hr hour | day | week wk | month
year yr | mph mile/h mi/h mile/hour | km/h kmh kmph | rad radian | $ dollar usd buck us\\$
cent ¢ | € euro eur | £ gbp | ¥ yuan rmb 元 | rs rupee ₹ inr | unit | sq square | cu cubic cube
hz hertz | n N newton | j J joule | w W watt | v V volt | a ampere | k K kelvin | celsius
"""
_UNITS = {
    name: names.split()[0] for names in re.split(r"[|\n]", _MEASURES) for name in names.split()
}
_SIGNS = {"%", "°", *_UNITS.values()}
_POWERS = ("squared", "cubed")
_CURRENCIES = ("$", "cent", "€", "£", "¥", "rs")
_LONE_LETTER_UNITS = "mgshLlVNJWAKCF"
FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt max min gcd lcm"
    " mod det frac pi"
)
# Words that change a value or join two: text with one of them is not a unit.
_NO_UNITS = _words(
    "not no more less than least most greater fewer larger smaller between except times plus minus"
    " over under above below about dozen half third quarter all any every none each if for when"
    " where unless until or and from to at is are was be other both either neither only"
    " factorial inverse twice double triple fail halve tenth hundredth thousandth fifth sixth"
    " seventh eighth ninth ten lakh crore wrong roughly 万 亿 千 百"
)
_BARE_WORDS = re.compile(
    r"\\text\{[^{}]*\}|(?<![\\A-Za-z_^{])((?:[A-Za-z]{2,}|[^\x00-\u03ff\W\d_]+)\.?(?:[\s/-]+[A-Za-z]+\.?)*)"
)
_UNIT = re.compile(
    r"\\text\{([^{}]*)\}\s*(?:\^\s*(?:\{(\d)\}|(\d)))?"
    r"|(\\\$|\\pounds|[€£¥₹¢₩]|(?<![a-zA-Z])(?:US|USD|EUR|Rs)(?:\\\$|\.?\s*(?=\d)))|\\(%)|\^(\\circ)"
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
            found.append(("%" if percent else "°" if degree else _UNITS.get(sign, "$"),))
            return " "
        unit = _name_unit(words, square or cube or "")
        in_front = not match.string[: match.start()].strip(" ({[")
        if unit is None or (in_front and unit[0] not in _CURRENCIES):
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
    if words[0].lower() in FUNCTIONS:
        return match[0]
    is_text = any(
        len(word) >= 4 or singular(word) in _UNITS or not word.isascii() for word in words
    ) or (len(words) > 1 and any(len(word) == 3 for word in words))
    return rf"\text{{{match[1]}}}" if is_text else match[0]


def _name_unit(words: str, power: str) -> Unit | None:
    """The words of a unit, measures in their short form; None for text that is none."""
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", words.replace("-", " "))
    if re.search(r"[^\w\s./$€£¥₹¢]|\d", words):
        return None
    names = words.split()
    plain = [name for name in names if name not in _POWERS]
    if not plain or any({name.lower(), singular(name)} & _NO_UNITS for name in plain):
        return None
    names = ["/".join(_short(part) for part in name.split("/")) for name in names]
    names = [_UNITS.get(name, name) for name in names]
    if names[-1] in _POWERS and len(names) > 1:
        power = "2" if names.pop() == "squared" else "3"
    if names[0] in ("sq", "cu", *_POWERS) and len(names) > 1:
        power = "2" if names.pop(0).startswith("sq") else "3"
    return (*names[:-1], names[-1] + power)


def _short(name: str) -> str:
    for word in (name.strip("."), singular(name)):
        if len(word) > 1 and word.lower() in _UNITS or word in _UNITS:
            return _UNITS.get(word.lower(), word)
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
    if {name.rstrip("23") for name in a | b} & _SIGNS:
        return a | b == {"°", "celsius"}
    return a <= b or b <= a


def letter_as_unit(body: str, unit: Unit) -> tuple[str, Unit] | None:
    """`5 m` as (5, m): take_unit cannot know whether m is a variable. Also `5m`, where m is the
    unit of the other side. None for anything else.
    """
    match = re.fullmatch(rf"(.*[\d}})])(\s*)([{_LONE_LETTER_UNITS}])(?:\^\{{?([23])\}}?)?", body)
    if match is None:
        return None
    found = (_UNITS.get(match[3].lower(), match[3]) + (match[4] or ""),)
    return (match[1], found) if match[2] or found == unit else None
