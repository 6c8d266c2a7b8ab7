"""Check golds before anything is graded with them.

A gold must parse fully, equal itself, and differ when any one digit changes; otherwise the grader
would refuse right answers or accept wrong ones.
"""

import re

from rivet.grading.verdict import Kind

MAX_DIGITS_TRIED = 24


def check_math_gold(gold: str) -> str | None:
    """Return what is wrong with a gold of the kind `math`, or None. Runs in a worker."""
    from rivet.grading.decide import compare_spelled, decide_math, read_gold
    from rivet.grading.normalize import normalize

    spelled, readings, trouble = read_gold(gold)
    if trouble:
        return trouble
    if decide_math(gold, gold)[0] != "right":
        return "it does not equal itself"
    if not readings:
        return None
    outcome, reason = compare_spelled(readings, spelled)
    if outcome != "right":
        return f"it does not equal itself ({reason})"
    for match in list(re.finditer(r"\d", gold))[:MAX_DIGITS_TRIED]:
        digit = str((int(match.group()) + 1) % 10)
        changed = gold[: match.start()] + digit + gold[match.end() :]
        if compare_spelled(readings, normalize(changed))[0] == "right":
            return f"it still equals itself with one digit changed: {changed[:80]}"
    return None


def check_gold(gold: str, kind: Kind = "math") -> str | None:
    """Return what makes a gold unusable, or None.

    Args:
        gold: The gold answer.
        kind: How it will be graded.
    """
    from rivet.grading.local_kinds import is_letter

    if kind == "choice":
        return None if is_letter(gold) else "it is not the letter of a choice"
    if kind == "exact":
        return None if gold.strip() else "it is empty"
    return check_math_gold(gold)
