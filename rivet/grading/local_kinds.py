"""Verdicts that need no worker: integers, multiple choice and exact strings.

Each costs microseconds whatever the text is, so it runs in the caller's thread.
"""

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from rivet.grading.choice import LETTERS, is_letter_gold, letter_of, text_of
from rivet.grading.normalize import MAX_LENGTH, normalize
from rivet.grading.verdict import BadRequest, Outcome

Verdict = tuple[Outcome, str]
# Possessive: blanks that were taken once are not shared out anew when the rest does not fit.
_INTEGER = re.compile(r"\s*+\$?+\s*+([+-]?+)\s*+(\d{1,400}+)\s*+\$?+\s*+")
_NUMERAL = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})")


def decide_integer(gold: str, answer: str) -> Verdict | None:
    """Compare two plain integers; None when either is anything else."""
    wanted = _INTEGER.fullmatch(gold)
    if wanted is None or "$" in gold:
        return None
    given = _INTEGER.fullmatch(answer)
    if given is None:
        return None
    is_same = int("".join(wanted.groups())) == int("".join(given.groups()))
    return ("right", "same integer") if is_same else ("wrong", "another integer")


def is_letter(gold: str) -> bool:
    """Tell whether a gold is the letter of a choice."""
    return len(gold) < 20 and is_letter_gold(normalize(gold))


def check_choice(gold: str, choices: Sequence[str] | None) -> str:
    """Return the letter of a multiple-choice gold.

    Raises:
        BadRequest: The gold is no letter, or there are too few choices for it.
    """
    spelled = normalize(gold[:MAX_LENGTH])
    letter = letter_of(spelled) if is_letter_gold(spelled) else None
    if letter is None:
        raise BadRequest(f"gold of kind 'choice': expected a letter A-J, got {gold[:60]!r}")
    if choices is not None and LETTERS.index(letter) >= len(choices):
        raise BadRequest(f"gold {letter} of kind 'choice': there are only {len(choices)} choices")
    return letter


def decide_choice(gold: str, answer: str, choices: Sequence[str] | None) -> Verdict:
    """Compare the letter that an answer commits to.

    Raises:
        BadRequest: The gold is no letter, or there are too few choices for it.
    """
    wanted = check_choice(gold, choices)
    given_text = normalize(answer[:MAX_LENGTH])
    given = letter_of(given_text)
    if given is None:
        return "no_answer", "not one letter, or a letter with its option"
    if choices is not None:
        if LETTERS.index(given) >= len(choices):
            return "wrong", f"there is no option {given}"
        # A letter beside the text of another option commits to neither.
        option = text_of(given_text)
        spelled_choices = [normalize(choice) for choice in choices]
        if option in spelled_choices and spelled_choices[LETTERS.index(given)] != option:
            return "no_answer", "the letter and the option's text disagree"
    return ("right", "same letter") if given == wanted else ("wrong", "another letter")


def decide_exact(gold: str, answer: str) -> Verdict:
    """Compare as strings, apart from spacing; numerals by their exact value."""
    wanted, given = _plain(gold), _plain(answer)
    if wanted == given:
        return "right", "same text"
    if _NUMERAL.fullmatch(wanted) and _NUMERAL.fullmatch(given):
        is_same = Fraction(wanted) == Fraction(given)
        return ("right", "same number") if is_same else ("wrong", "another number")
    return "wrong", "another text"


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text[:MAX_LENGTH]).strip("$ \n").split())
