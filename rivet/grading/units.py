"""The units that may follow a number, and how they convert.

Only what stands here is a unit; any other word behind a number makes the answer unreadable, so
that "7 (or possibly 8)" or "7 is wrong" can never pass for 7.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_KNOWN: dict[str, tuple[str, Fraction]] = {}
_COUNTED = frozenset(
    """
    apple banana orange egg cookie cake pie slice cup book page word letter digit number point goal
    game match card coin bill stamp marble ball bead block box bag basket bottle can jar bucket
    people person child kid boy girl man men woman women student teacher worker employee customer
    guest friend player team member family animal dog cat cow chicken sheep horse fish bird flower
    tree plant rose seed pencil pen crayon toy doll sticker ticket seat table chair room house car
    bus truck bike vehicle trip lap step way path route solution root value term element subset set
    pair triple tuple triangle square rectangle side edge vertex vertices diagonal face cube unit
    possibility possibilities combination permutation arrangement outcome case choice color colour
    time fold piece part item object dozen pack packet package load order meal lunch sandwich pizza
    donut candy candies shirt shoe sock dress hat pant window door floor mark question problem test
    call message photo picture song movie song class lesson school city cities turn round hit
    move row column group share vote more less left total each shell acre brick tile ribbon
    """.split()
)


def _define(dimension: str, factor: str, names: str) -> None:
    for name in names.split():
        _KNOWN[name] = (dimension, Fraction(factor))


_define("length", "1/1000", "mm millimeter millimetre")
_define("length", "1/100", "cm centimeter centimetre")
_define("length", "1", "m meter metre")
_define("length", "1000", "km kilometer kilometre")
_define("length", "127/5000", "in inch inches")
_define("length", "381/1250", "ft foot feet")
_define("length", "1143/1250", "yd yard")
_define("length", "201168/125", "mi mile")
_define("mass", "1/1000000", "mg milligram")
_define("mass", "1/1000", "g gm gram")
_define("mass", "1", "kg kilogram")
_define("mass", "45359237/100000000", "lb pound")
_define("mass", "1000", "tonne")
_define("time", "1/1000", "ms millisecond")
_define("time", "1", "s sec second")
_define("time", "60", "min minute")
_define("time", "3600", "h hr hour")
_define("time", "86400", "day")
_define("time", "604800", "week")
_define("month", "1", "month")
_define("month", "12", "yr year")
_define("volume", "1/1000", "ml mL milliliter millilitre")
_define("volume", "1", "l L liter litre")
_define("money", "1", "dollar buck USD")
_define("money", "1/100", "cent")
_define("euro", "1", "euro EUR")
_define("angle", "1", "degree deg")
_define("celsius", "1", "degreesC celsius")
_define("fahrenheit", "1", "degreesF fahrenheit")
_define("radian", "1", "rad radian")
_define("ounce", "1", "oz ounce")
_define("gallon", "1", "gal gallon")
_define("ton", "1", "ton")
for _name in (
    "N newton J joule W watt V volt A ampere Hz hertz K kelvin Pa pascal mol mole C coulomb T "
    "tesla eV Å angstrom kJ kW kPa MPa MeV keV nm atm bar cal kcal calorie"
).split():
    _define(_name, "1", _name)

_SINGLE_LETTERS = frozenset("mgslLhJNWVACK")
_TAIL = re.compile(
    r"(?P<tail>(?:\s*(?:\\text\{[^{}]*\}|\\degree(?:\s*[CF](?![a-zA-Z]))?|%|(?<![A-Za-z\\])[A-Za-z]{2,}|/(?=\s*(?:\\text|[A-Za-z]{2}))"
    r"|\\cdot(?=\s*\\text))(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?)+)\s*$"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: its dimension (a product of powers, as sorted text) and its size in base units."""

    dimension: str
    factor: Fraction


PERCENT = Unit("percent", Fraction(1))
DEGREE = Unit("angle", Fraction(1))
RADIAN = Unit("radian", Fraction(1))
_PREFIX_UNITS = {
    r"\dollar": Unit("money", Fraction(1)),
    r"\euro": Unit("euro", Fraction(1)),
    r"\pound": Unit("pound", Fraction(1)),
}


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split a normalised answer into its number and its unit, if it ends in a known one."""
    for sign, currency in _PREFIX_UNITS.items():
        if sign in text:
            body = text.replace(sign, " ", 1).strip()
            inner, other = split_unit(body)
            return (inner, currency) if other is None or other == currency else (text, None)
    match = _TAIL.search(text)
    if not match or match.start() == 0:
        return text, None
    body = text[: match.start()].strip()
    unit = read_unit(match.group("tail"))
    if unit is None or not body or body[-1] in "+-*/^_=<>(,":
        return text, None
    if unit == DEGREE and re.search(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])", body):
        return text, None
    return body, unit


def read_unit(text: str) -> Unit | None:
    """Read unit words such as `\\text{ cm}^2` or `miles per hour`; None when any is unknown."""
    text = re.sub(r"\\degree\s*(?:\\text\{\s*)?([CF])\s*\}?(?![a-zA-Z])", r" degrees\1 ", text)
    text = text.replace("%", " percent ").replace(r"\degree", " degree ")
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\cdot", " ", text)
    text = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1 ", text).replace(".", " ")
    text = re.sub(r"\s*/\s*|\b[Pp]er\b", " per ", text)
    text = re.sub(r"\bmph\b", " mi per h ", re.sub(r"\b(?:kph|kmph|kmh)\b", " km per h ", text))
    tokens = text.split()
    if not tokens:
        return None
    powers: dict[str, int] = {}
    factor = Fraction(1)
    sign, pending = 1, 1
    for token in tokens:
        if token == "per":
            sign = -1
            continue
        if token.lower() in ("square", "sq", "squared", "cubic", "cubed"):
            pending = 2 if token.lower().startswith("sq") else 3
            continue
        name, _, power = token.partition("^")
        known = _look_up(name)
        if known is None or not re.fullmatch(r"(?:-?[0-9])?", power):
            return None
        exponent = sign * (int(power) if power else pending)
        pending = 1
        powers[known[0]] = powers.get(known[0], 0) + exponent
        factor *= known[1] ** exponent
    if len(powers) > 1 and "percent" in powers:
        return None
    dimension = "*".join(f"{name}^{power}" for name, power in sorted(powers.items()) if power)
    if dimension in ("percent^1", "angle^1"):
        return PERCENT if dimension == "percent^1" else DEGREE
    return Unit(dimension.removesuffix("^1"), factor)


def _look_up(name: str) -> tuple[str, Fraction] | None:
    if len(name) == 1 and name not in _SINGLE_LETTERS:
        return None
    if name.lower() in ("percent", "percentage"):
        return "percent", Fraction(1)
    for spelled in (name, name.lower()):
        for singular in (spelled, spelled.removesuffix("s"), spelled.removesuffix("es")):
            if singular in _KNOWN:
                return _KNOWN[singular]
            if singular in _COUNTED:
                return singular, Fraction(1)
    return None
