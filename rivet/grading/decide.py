"""One verdict on one extracted answer; runs inside a worker process.

Owns: the order of the checks. Identical texts first, then our own reader and comparison, and
math-verify last. Golds are read once and remembered.
"""

import functools
import re

from rivet.grading.answers import Answer
from rivet.grading.choice import is_letter_gold, letter_of
from rivet.grading.compare import same
from rivet.grading.normalize import MAX_LENGTH, normalize
from rivet.grading.reader import readings
from rivet.grading.verdict import Outcome, TooExpensive, Unreadable

Verdict = tuple[Outcome, str]


def decide_math(gold: str, answer: str) -> Verdict:
    """Decide on one extracted answer of the kind `math`.

    Returns:
        The outcome and the reason. A gold that cannot be read never pays.
    """
    if len(answer) > MAX_LENGTH:
        return "wrong", "refused: too long"
    spelled = normalize(answer)
    gold_spelled, golds, trouble = read_gold(gold)
    if trouble:
        return "wrong", f"unusable gold: {trouble}"
    if not spelled:
        return "no_answer", "the answer is empty"
    if gold_spelled == spelled:
        return "right", "identical"
    if is_letter_gold(gold_spelled):
        letter = letter_of(spelled)
        if letter is not None:
            is_same = letter == letter_of(gold_spelled)
            return ("right", "same letter") if is_same else ("wrong", "another letter")
    return compare_spelled(golds, _without_unit(spelled, gold_spelled))


def compare_spelled(golds: tuple[Answer, ...], spelled: str) -> Verdict:
    """Compare a normalised answer with every reading of the gold."""
    try:
        answers = readings(spelled)
        for gold in golds:
            for answer in answers:
                if same(gold, answer):
                    return "right", "same value"
    except TooExpensive as error:
        return "wrong", f"refused: {error}"
    except Unreadable as error:
        return "wrong", f"unreadable: {error}"
    except (OverflowError, KeyError, RecursionError) as error:
        # Where the checks above have a gap, an answer that overturns them must not escape its 0.
        return "wrong", f"refused: {type(error).__name__}"
    return "wrong", "different"


_UNIT_WORDS = re.compile(r"(?<=[\d}])\s*\\text\{\s*([A-Za-z][A-Za-z ]*?)\s*\}$")


def _without_unit(spelled: str, gold: str) -> str:
    """Drop words behind the answer's number that stand behind the gold's, known unit or not."""
    ours, theirs = _UNIT_WORDS.search(gold), _UNIT_WORDS.search(spelled)
    if ours and theirs and ours.group(1).casefold() == theirs.group(1).casefold():
        return spelled[: theirs.start()]
    return spelled


def _readings_of_gold(spelled: str) -> list[Answer]:
    """Read a gold, which unlike an answer may count things that nobody listed as units."""
    try:
        return readings(spelled)
    except Unreadable:
        words = _UNIT_WORDS.search(spelled)
        if words is None or re.search(r"\b(?:or|and|to|if|not)\b", words.group(1)):
            raise
        return readings(spelled[: words.start()])


@functools.lru_cache(maxsize=4096)
def read_gold(gold: str) -> tuple[str, tuple[Answer, ...], str]:
    """Read a gold: its normalised text, its readings, and what is wrong with it ('' if nothing).

    A gold that does not equal itself (0/0, or a value that costs too much) is unusable.
    """
    if len(gold) > MAX_LENGTH:
        return "", (), "too long"
    spelled = normalize(gold)
    if not spelled:
        return "", (), "empty"
    if is_letter_gold(spelled):
        return spelled, (), ""
    try:
        golds = tuple(_readings_of_gold(spelled))
        trouble = "" if all(same(form, form) for form in golds) else "it does not equal itself"
        return spelled, golds, trouble
    except (Unreadable, TooExpensive) as error:
        return spelled, (), str(error)
