"""Find the answer in a model's text.

Owns: the text after the last `</think>`, brace-matched boxes, and (evaluation only) an explicit
final answer line. It never looks for "the last number". Every scan is one pass over the text, so
a hostile text costs no more than its length.
"""

import re
from dataclasses import dataclass

from rivet.grading.verdict import Mode, Source

# The look-behind tries a run of backslashes once, not again from each of them.
_BRACES = re.compile(r"(?<!\\)\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# What may stand between two boxes that together are one answer.
_FILLER = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\s*\{([^{}]*)\}|\\(?:quad|qquad|[,;:! \[\]()])|[$\s*&~]+"
)
_JOINER = re.compile(r"(?:,|;|,?\s*(?:and|or))?", re.IGNORECASE)

# An explicit final answer: "The final answer is ...", "**Answer:** ...", "#### ...".
_LINE = re.compile(
    r"(?:\banswer(?:\*\*|__)?\s*(?:is|:|=|：)|答案\s*(?:是|为|:|：)|^####)"
    r"[ \t]*(?:is\b)?[ \t]*:?",
    re.IGNORECASE | re.MULTILINE,
)
_DISPLAY = re.compile(r"\s*(?:\\\[(.+?)\\\]|\$\$(.+?)\$\$)", re.DOTALL)
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z(])|\n")


@dataclass(frozen=True, slots=True)
class Extraction:
    """An extracted answer.

    Args:
        answer: The answer as written, or None.
        reason: Why there is none, or how it was found.
        source: "box", "line" or "none".
        alternatives: Every top-level boxed text that was merged into `answer`.
    """

    answer: str | None
    reason: str
    source: Source


def extract(text: str, mode: Mode = "reward") -> Extraction:
    """Find the answer in a model's text.

    Args:
        text: Everything the model wrote.
        mode: "reward" reads boxes only; "eval" may fall back to an explicit answer line when the
            text has no box at all.
    """
    final = after_thinking(text)
    if final is None:
        return Extraction(None, "the thinking was never closed", "none")
    boxed = last_box(final)
    if boxed.answer is not None or mode == "reward" or boxed.reason != "no box":
        return boxed
    return answer_line(final)


def after_thinking(text: str) -> str | None:
    """Return the text after the last `</think>`, or None when a later `<think>` never closes."""
    final = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
    opened = final.rfind("<think>")
    if opened == -1:
        return final
    # Text before an unclosed block was written before the thinking, so it is not the final word.
    return None


def last_box(text: str) -> Extraction:
    """Return the last closed, non-empty box, or the boxes joined with it into one answer.

    A box that is opened after it and never closed means that the text was cut: no answer.
    """
    boxes, last_unclosed = _boxes(text)
    filled = [box for box in boxes if _is_filled(text[box[1] : box[2]])]
    if not filled:
        reason = "the box was never closed" if last_unclosed >= 0 else "no box"
        if boxes and last_unclosed < 0:
            reason = "every box is empty"
        return Extraction(None, reason, "none")
    if last_unclosed > filled[-1][0]:
        return Extraction(None, "the last box was never closed", "none")
    parts = [text[filled[-1][1] : filled[-1][2]].strip()]
    for before, after in zip(reversed(filled[:-1]), reversed(filled), strict=False):
        joiner = _FILLER.sub(lambda m: f" {m.group(1) or ''} ", text[before[3] : after[0]]).strip()
        if not _JOINER.fullmatch(joiner):
            break
        part = text[before[1] : before[2]].strip()
        # The same box twice with nothing between is one answer; "2, 2" is a list of two.
        if joiner or part not in parts:
            parts.insert(0, part)
    reason = "box" if len(parts) == 1 else f"{len(parts)} joined boxes"
    return Extraction(", ".join(parts), reason, "box")


def _boxes(text: str) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return the outermost closed boxes as (start, inner start, inner end, end), in order, and the
    start of the last box that never closes (or -1)."""
    closed: list[tuple[int, int, int, int]] = []
    stack: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opener = stack.pop() if stack else None
            if opener is not None:
                while closed and closed[-1][0] > opener[0]:
                    closed.pop()
                closed.append((opener[0], opener[1], match.start(), match.end()))
        elif token == "{":
            stack.append(None)
        elif token.endswith("{") and "box" in token:
            stack.append((match.start(), match.end()))
    unclosed = [opener[0] for opener in stack if opener is not None]
    return closed, unclosed[-1] if unclosed else -1


def _is_filled(inner: str) -> bool:
    return bool(re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*\}|[\s$~]|\\[,;:! ]", "", inner))


def answer_line(text: str) -> Extraction:
    """Return what the last explicit answer line or sentence states."""
    found = list(_LINE.finditer(text))
    if not found:
        return Extraction(None, "no box and no answer line", "none")
    last = found[-1]
    rest = text[last.end() : last.end() + 2000]
    display = _DISPLAY.match(rest)
    if display:
        stated = display.group(1) or display.group(2)
    else:
        stated = _SENTENCE_END.split(rest.lstrip(), maxsplit=1)[0]
    stated = stated.replace("**", "").replace("__", "").strip()
    stated = stated.rstrip(".。").strip()
    if not stated:
        return Extraction(None, "the answer line is empty", "none")
    return Extraction(stated, "answer line", "line")
