"""Walk over the text of an expression, with bounds on its depth and size.

The parser (`syntax.py`) builds on it; nothing here knows what the notation means, beyond what may
follow a name.
"""

import re

from rivet.grading.normalize import matching
from rivet.grading.notation import PRIMES
from rivet.grading.verdict import Unreadable

MAX_DEPTH = 40
MAX_SIZE = 300
COMMAND = re.compile(r"\\([a-zA-Z]+)\s*")


class Scanner:
    """A place in a text, and the bounds on what may be built from it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.size = 0
        self.bars = 0

    def grow(self) -> None:
        """Count one part of the expression; the tree may be as deep as it has parts."""
        self.size += 1
        if self.size > MAX_SIZE:
            raise Unreadable("too long an expression")

    def enter(self) -> None:
        """Go one level deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deep")

    def space(self) -> None:
        """Skip blanks."""
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def peek(self) -> str:
        """Return the next character that is no blank, or ''."""
        self.space()
        return self.text[self.at] if self.at < len(self.text) else ""

    def command(self) -> str:
        """Return the command at this place without taking it, or ''."""
        self.space()
        match = COMMAND.match(self.text, self.at)
        return match.group(1) if match else ""

    def take_command(self) -> None:
        """Take the command at this place."""
        match = COMMAND.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def take(self, char: str) -> None:
        """Take one character that must be there."""
        if self.peek() != char:
            raise self.fail(f"expected {char!r}")
        self.at += 1

    def fail(self, why: str) -> Unreadable:
        """Return the error for this place."""
        return Unreadable(f"{why} at {self.text[self.at : self.at + 20]!r}")

    def rest(self) -> str:
        """Return what comes next, as far as a short pattern looks."""
        return self.text[self.at : self.at + 60]

    def raw_argument(self) -> str:
        """Take a macro's argument as text: a group, a command or one character."""
        if self.peek() == "{":
            end = matching(self.text, self.at)
            if end < 0:
                raise self.fail("a brace is never closed")
            raw = self.text[self.at + 1 : end]
            self.at = end + 1
            raw = raw.replace("\\text", "").replace("{", "").replace("}", "")
            return raw.replace(" ", "")
        match = COMMAND.match(self.text, self.at)
        if match:
            self.at = match.end()
            if match.group(1) == "text":
                return self.raw_argument()
            return match.group(1)
        self.at += 1
        return self.text[self.at - 1 : self.at]

    def decoration(self) -> str:
        """Read the index and the primes behind a name."""
        out = ""
        while True:
            if self.peek() == "_":
                self.at += 1
                out += "_" + self.raw_argument()
            elif self.peek() == "'":
                self.at += 1
                out += "'"
            elif match := PRIMES.match(self.rest()):
                self.at += match.end()
                out += "'" * max(match.group().count("prime"), 1)
            else:
                return out
