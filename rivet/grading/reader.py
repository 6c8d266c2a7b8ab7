"""Read a normalised answer into one of the forms of `answers.py`.

Reading goes from the outside in: lists, unions, relations, brackets, then single values. What fits
no form is `Unreadable`; a reading is never a guess at the part of a text that happens to parse.
"""

import re

from rivet.grading.answers import (
    Answer,
    Based,
    Colon,
    Listing,
    Matrix,
    Ordered,
    Quantity,
    RealLine,
    Relation,
    Union,
    Words,
)
from rivet.grading.equality import is_near
from rivet.grading.normalize import MAX_LENGTH, ungroup
from rivet.grading.notation import FUNCTIONS
from rivet.grading.syntax import parse
from rivet.grading.units import split_unit
from rivet.grading.verdict import Unreadable

MAX_ITEMS = 64
MAX_NESTING = 8

_SEPARATOR = re.compile(
    r",?\s*(?:\\text\{\s*(or|and|,\s*or|,\s*and)\s*\}|(?<![A-Za-z\\])(or|and)(?![A-Za-z])|\\(lor|land)(?![a-z]))"
    r"|,|;|\\newline(?![a-z])"
)
_RELATION = re.compile(
    r"\\(?:le|ge|ne|in|equiv|to|mapsto|sim|cong|subset|subseteq|ll|gg|iff|implies|Rightarrow)"
    r"(?![a-zA-Z])|<=|>=|!=|=|<|>"
)
_OPERATOR = {
    "\\le": "<=", "<=": "<=", "\\ge": ">=", ">=": ">=", "\\ne": "!=", "!=": "!=", "=": "=",
    "<": "<", ">": ">", "\\in": "in",
}  # fmt: skip
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])")
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_MINUS_SET = re.compile(r"\\setminus(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin\s*\{([pbB]?(?:small)?matrix|array)\}")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d]|,\d)")
_SPACED_THOUSANDS = re.compile(r"^([+-]?\s*[1-9]\d{0,2})((?: \d{3})+)(?![\d/ ]*[\d/])")
_PLAIN_MIXED = re.compile(r"^([+-]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/.^])")
_BASED = re.compile(
    r"\(?([+-]?(?=[A-Fa-f]*\d)[\dA-Fa-f]+(?:\.\d+)?)\s*\)?\s*_\s*(?:\{\s*\(?(\d+)\)?\s*\}|(\d+))"
)
_BASE_WORDS = re.compile(r"(\d[\dA-Fa-f]*)\s*_?\s*\{?\s*\\text\{\s*(?:in )?base\s*(\d+)\s*\}\s*\}?")
_COLON = re.compile(r"\s*:\s*")
_TIME_TAIL = re.compile(r"\s*(?:\\text\{)?\s*([ap])\.?\s*m\.?\s*\}?\s*$", re.IGNORECASE)
_HOUR = re.compile(r"\d{1,2}(?:\s*:\s*\d\d)?" + _TIME_TAIL.pattern, re.IGNORECASE)
_NUMERAL = re.compile(r"[+-]?\s*(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_BUILDER = re.compile(r"\s*[A-Za-z]\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?))?\s*(?:\||:)\s*(.+)")
_SHORT_WORDS = frozenset(
    "yes no up on in off out do if it is as at be by he me my of so to".split()
)
_UNWRAPPED = re.compile(r"\\text\{\s*([\dA-Fa-f]+)\s*\}")
_NO_WORDS = frozenset("sqrt pi inf infty infinity or and".split())
_WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_REALS = re.compile(
    r"\\mathbb\s*(?:\{\s*R\s*\}|R)|\\text\{\s*all real numbers\s*\}|all real numbers"
)


def read(text: str) -> Answer:
    """Read a normalised text as one answer.

    Raises:
        Unreadable: It fits no form.
    """
    return _read(text, 0)


def readings(text: str) -> list[Answer]:
    """Return every reading of a text: `1,234` is a number and may be a list of two.

    Raises:
        Unreadable: It fits no form.
    """
    first = read(text)
    match = _THOUSANDS.fullmatch(text)
    if match and not isinstance(first, Listing):
        return [first, Listing(tuple(_value(part) for part in text.split(",")))]
    return [first]


def _read(text: str, nesting: int) -> Answer:
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    if nesting > MAX_NESTING:
        raise Unreadable("nested too deep")
    text = _bare(text)
    if not text:
        raise Unreadable("empty")
    approximate = _APPROXIMATELY.search(text)
    if approximate:
        text = _exact_side(text[: approximate.start()].strip(), text[approximate.end() :].strip())
    matrix = _MATRIX.match(text)
    if matrix:
        return _matrix(text, matrix, nesting)
    text = _join_thousands(text)
    words = _words(text)
    if words is not None:
        return words
    whole = _WHOLE_TEXT.fullmatch(text)
    if whole:
        return _read(whole.group(1), nesting + 1)
    parts, joined_by = _split_list(text)
    if len(parts) > 1 or _has_sign_pair(text):
        return _listing(parts, joined_by, nesting)
    for form in (_relation, _set_operation, _bracketed):
        answer = form(text, nesting)
        if answer is not None:
            return answer
    return _value(text)


def _exact_side(exact: str, numeral: str) -> str:
    """Drop the decimal from `x = a \\approx 0.33`, when it is an approximation of a."""
    value = _value(re.split(_RELATION, exact)[-1])
    stated = _value(numeral)
    if isinstance(value, Quantity) and isinstance(stated, Quantity) and stated.numeral:
        if is_near(value.node, stated.numeral):
            return _bare(exact)
    raise Unreadable("an approximation")


def _bare(text: str) -> str:
    """Drop space and braces around a whole text."""
    return ungroup(text.strip())


def _join_thousands(text: str) -> str:
    """Join `1,234,567`, but not in brackets, where a comma separates coordinates."""
    if "," in text and "(" not in text and "[" not in text and "\\{" not in text:
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    return _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)


def _words(text: str) -> Words | None:
    """Read a text that is only words, such as a name; not one that is mathematics or a number."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    plain = re.sub(r"\s+", " ", plain).strip(" .")
    if not re.fullmatch(r"[^\W\d_][^\W_]*(?:[ \-'][^\W_]+)*", plain):
        return None
    runs = re.findall(r"[^\W\d_]+", plain)
    if any(run in FUNCTIONS or run in _NO_WORDS for run in runs):
        return None
    if not any(len(run) >= 3 or run.lower() in _SHORT_WORDS for run in runs):
        return None
    folded = re.sub(r"^(?:the|an?) (?=\w{2})", "", plain.casefold())
    return Words("empty set" if folded in ("no solution", "no solutions") else folded)


def _outside_brackets(text: str) -> list[bool]:
    """Mark each index that lies outside all brackets; any opening and closing pair up."""
    outside = [False] * len(text)
    depth = index = 0
    while index < len(text):
        char = text[index]
        width = 2 if char == "\\" and index + 1 < len(text) else 1
        token = text[index : index + width]
        if token in ("(", "[", "{", "\\{") or text.startswith(("\\langle", "\\begin"), index):
            depth += 1
        elif token in (")", "]", "}", "\\}") or text.startswith(("\\rangle", "\\end"), index):
            depth -= 1
            if depth < 0:
                raise Unreadable("brackets do not match")
        elif depth == 0:
            outside[index] = True
        index += width
    if depth:
        raise Unreadable("brackets do not match")
    return outside


def _split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[re.Match[str]]]:
    """Split at the matches of a pattern that lie outside all brackets."""
    if not pattern.search(text):
        return [text], []
    outside = _outside_brackets(text)
    parts, matches, last = [], [], 0
    for match in pattern.finditer(text):
        if outside[match.start()]:
            parts.append(text[last : match.start()])
            matches.append(match)
            last = match.end()
    parts.append(text[last:])
    return parts, matches


def _split_list(text: str) -> tuple[list[str], str]:
    parts, matches = _split(text, _SEPARATOR)
    if len(parts) > MAX_ITEMS:
        raise Unreadable("too many values")
    if len(parts) == 2 and not parts[1].strip() and matches[0].group() == "\\newline":
        return parts[:1], ","
    joined_by = ","
    if matches:
        word = re.sub(r"[^a-z]", "", matches[-1].group().replace("text", ""))
        joined_by = {"lor": "or", "land": "and"}.get(word, word) or ","
    return parts, joined_by


def _has_sign_pair(text: str) -> bool:
    return (
        re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text) is not None
        and all(outside not in text for outside in ("(", "[", "\\{"))
        or _sign_pair_outside(text)
    )


def _sign_pair_outside(text: str) -> bool:
    _, matches = _split(text, re.compile(r"\\(?:pm|mp)(?![a-zA-Z])"))
    return bool(matches)


def _sign_pair(text: str) -> list[str]:
    """Spell out `a \\pm b` as its two values; all signs of one value go together."""
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return [text]
    upper = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
    lower = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
    return [upper, lower]


def _listing(parts: list[str], joined_by: str, nesting: int, *, is_set: bool = False) -> Listing:
    items: list[Answer] = []
    for part in parts:
        for value in _sign_pair(part):
            items.append(_read(value, nesting + 1))
    return Listing(_share_name(items), is_set, joined_by)


def _share_name(items: list[Answer]) -> tuple[Answer, ...]:
    """Read `n = 2, 3, 4` as three values of n."""
    first = items[0]
    if (
        isinstance(first, Relation)
        and first.operators == ("=",)
        and len(items) > 1
        and not any(isinstance(item, Relation | Words) for item in items[1:])
    ):
        named = [Relation((first.sides[0], item), ("=",)) for item in items[1:]]
        return (first, *named)
    return tuple(items)


def _relation(text: str, nesting: int) -> Answer | None:
    parts, matches = _split(text, _RELATION)
    if not matches:
        return None
    operators = tuple(_OPERATOR.get(match.group(), "") for match in matches)
    if "" in operators:
        raise Unreadable("an unknown relation")
    if len(parts) > 12:
        raise Unreadable("too many relations")
    sides = tuple(_read(part, nesting + 1) for part in parts)
    return Relation(sides, operators)


def _set_operation(text: str, nesting: int) -> Answer | None:
    parts, _ = _split(text, _UNION)
    if len(parts) > 1:
        return Union(tuple(_read(part, nesting + 1) for part in parts))
    parts, _ = _split(text, _MINUS_SET)
    if len(parts) == 2:
        return Union((_read(parts[0], nesting + 1),), _read(parts[1], nesting + 1))
    if _REALS.fullmatch(text):
        return RealLine()
    return None


def _bracketed(text: str, nesting: int) -> Answer | None:
    """Read a set in braces, a tuple or an interval, when the brackets enclose the whole text."""
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2].strip()
        if not inner:
            return Words("empty set")
        builder = _BUILDER.fullmatch(inner)
        if builder and _RELATION.search(builder.group(1)):
            return _read(builder.group(1), nesting + 1)
        parts, joined_by = _split_list(inner)
        return _listing(parts, joined_by, nesting, is_set=True)
    opening, closing = text[:1], text[-1:]
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        opening = closing = "<"
        inner = text[len("\\langle") : -len("\\rangle")]
    elif opening in "([" and closing in ")]" and _encloses(text):
        inner = text[1:-1]
    else:
        return None
    parts, matches = _split(inner, re.compile(r",|;"))
    if not matches:
        if opening == "(" and closing == ")":
            return _read(inner, nesting + 1)
        return None
    if len(parts) > MAX_ITEMS:
        raise Unreadable("too many values")
    return Ordered(tuple(_read(part, nesting + 1) for part in parts), opening, closing)


def _encloses(text: str) -> bool:
    """Tell whether the first bracket closes at the very end."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth == 0:
            return index == len(text) - 1
    return False


def _matrix(text: str, match: re.Match[str], nesting: int) -> Matrix:
    end = f"\\end{{{match.group(1)}}}"
    body = re.sub(r"\\end\s*\{\s*", r"\\end{", text)[match.end() :]
    if not body.rstrip().endswith(end):
        raise Unreadable("text around a matrix")
    body = body.rstrip().removesuffix(end)
    if match.group(1) == "array":
        body = re.sub(r"^\s*\{[clr| ]*\}", "", body)
    body = re.sub(r"\\hline", "", body)
    rows = [row for row in re.split(r"\\newline(?![a-z])(?:\s*\[[^\]]*\])?", body) if row.strip()]
    if not rows or "\\begin" in body or len(rows) > MAX_ITEMS:
        raise Unreadable("a matrix that cannot be read")
    cells = tuple(tuple(_read(cell, nesting + 1) for cell in row.split("&")) for row in rows)
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of a matrix differ in length")
    return Matrix(cells)


def _value(text: str) -> Answer:
    """Read a single value: a based numeral, a ratio or time, a quantity."""
    text = text.strip()
    based = _BASED.fullmatch(_UNWRAPPED.sub(r"\1", text)) or _BASE_WORDS.fullmatch(text)
    if based:
        base = int(next(group for group in based.groups()[1:] if group))
        if base == 10:
            return _value(based.group(1))
        return Based(based.group(1).upper().lstrip("0+") or "0", base)
    if ":" in text or _HOUR.fullmatch(text):
        return _colon(text)
    if re.fullmatch(r"\\emptyset", text):
        return Words("empty set")
    body, unit = split_unit(text)
    body = _PLAIN_MIXED.sub(r"\1(\2+\3/\4)", _SPACED_THOUSANDS.sub(_unspace, body.strip()))
    numeral = body.replace(" ", "") if _NUMERAL.fullmatch(body) else None
    return Quantity(parse(body), unit, numeral, text)


def _unspace(match: re.Match[str]) -> str:
    return match.group().replace(" ", "")


def _colon(text: str) -> Colon:
    half = _TIME_TAIL.search(text)
    if half:
        text = text[: half.start()]
    parts = [part.strip() for part in _COLON.split(text)]
    if len(parts) > 6:
        raise Unreadable("too many parts of a ratio")
    if half and len(parts) == 1:
        parts.append("00")
    if any(not re.fullmatch(r"[A-Za-z0-9.+\-*/^{}()\\ ]+", part) for part in parts):
        raise Unreadable("a ratio or time that cannot be read")
    for part in parts:
        parse(part)
    parts[0] = parts[0].lstrip("0") or "0" if parts[0].isdigit() else parts[0]
    spelled = [part.replace(" ", "") for part in parts]
    return Colon((*spelled, half.group(1).lower()) if half else tuple(spelled))
