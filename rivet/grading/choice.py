"""Multiple choice: the letter that an answer commits to.

An answer is a letter, or a letter with its delimiter and the option's text. Anything else,
including two letters, is no answer: the option's text alone is never matched.
"""

import re

LETTERS = "ABCDEFGHIJ"

_WRAPPING = re.compile(r"\\text\{([^{}]*)\}")
_ALONE = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(\s*([A-J])\s*\)|\[\s*([A-J])\s*\]|([A-J])\s*[).:]?)",
    re.IGNORECASE,
)
_WITH_TEXT = re.compile(
    r"(?:(?:option|choice)\s*)?(?:\(\s*([A-Ja-j])\s*\)\s*[:.]?|([A-J])\s*[):]|([A-J])\.(?=\s)|([a-j])\))\s*(.+)",
    re.DOTALL,
)
_ANOTHER = re.compile(
    r"\(\s*[A-J]\s*\)|^(?:,|;|/|or\b|and\b|&)|\b(?:or|and)\s+\(?[A-J]\b|\b[A-J]\)"
    r"|^[A-J]$|^(?:is|was|not|wrong|incorrect|false)\b"
)


def letter_of(text: str) -> str | None:
    """Return the letter that a normalised answer commits to, or None.

    Args:
        text: The extracted answer after `normalize`.
    """
    text = _WRAPPING.sub(r" \1 ", text)
    text = re.sub(r"\s+", " ", text).strip().strip("{}*`\"'").strip()
    alone = _ALONE.fullmatch(text)
    if alone:
        return _first(alone).upper()
    with_text = _WITH_TEXT.fullmatch(text)
    if with_text and not _ANOTHER.search(with_text.group(5)):
        return next(group for group in with_text.groups()[:4] if group).upper()
    return None


def is_letter_gold(text: str) -> bool:
    """Tell whether a normalised gold is the letter of a choice."""
    return re.fullmatch(r"\(?\s*[A-J]\s*\)?|\\text\{\s*\(?[A-J]\)?\s*\}", text) is not None


def _first(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group)


def text_of(text: str) -> str:
    """Return the option's text that stands beside the letter, or ''."""
    with_text = _WITH_TEXT.fullmatch(re.sub(r"\s+", " ", _WRAPPING.sub(r" \1 ", text)).strip())
    return with_text.group(5).strip() if with_text else ""
