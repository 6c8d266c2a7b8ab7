"""What is put into a trajectory beside the controller's own tokens: replies and program output.

Our tags are encoded trusted, everything inside them untrusted, so foreign text can forge nothing.
What is too long is cut at a token and says so; the tags are closed all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rivet.protocol import Style
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author

CUT = " ... [cut]"


@dataclass(slots=True)
class Splice:
    """Tokens to append, as runs of one author each."""

    runs: list[tuple[Author, list[int]]] = field(default_factory=list)

    def add(self, author: Author, ids: Sequence[int]) -> None:
        """Append tokens; neighbours of one author become one run."""
        if not ids:
            return
        if self.runs and self.runs[-1][0] == author:
            self.runs[-1][1].extend(ids)
        else:
            self.runs.append((author, list(ids)))

    def extend(self, other: Splice) -> None:
        """Append another splice."""
        for author, ids in other.runs:
            self.add(author, ids)

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.runs)


class Splicer:
    """Lays out spliced spans for one tokenizer and style.

    Args:
        tokenizer: Encodes tags and foreign text.
        style: The layout that the controller knows.
    """

    def __init__(self, tokenizer: ProtocolTokenizer, style: Style) -> None:
        self._tokenizer = tokenizer
        self._style = style

    def gap(self, last_id: int) -> list[int]:
        """What is missing between a closing tag as it was sampled and our next tag."""
        after = self._style.after_tag
        if not after or self._tokenizer.token_bytes[last_id].endswith(after.encode()):
            return []
        return self._tokenizer.encode(after)

    def output(self, text: str, max_length: int) -> Splice:
        """`<output>` with what a program printed, at most `max_length` tokens of it."""
        splice = Splice()
        splice.add("environment", self._tokenizer.encode(self._style.open("output")))
        splice.add("environment", self.foreign(text, max_length)[0])
        splice.add("environment", self._tokenizer.encode(self._style.close("output")))
        return splice

    def open_reply(self, expert: str) -> list[int]:
        """The opening tag of a reply."""
        return self._tokenizer.encode(self._style.open("reply", expert))

    def close_reply(self) -> list[int]:
        """The closing tag of a reply."""
        return self._tokenizer.encode(self._style.close("reply"))

    def program(self, code: str) -> list[int]:
        """An expert's program between its tags."""
        return [
            *self._tokenizer.encode(self._style.open("python")),
            *self.foreign(code)[0],
            *self._tokenizer.encode(self._style.close("python")),
        ]

    def foreign(self, text: str, max_length: int | None = None) -> tuple[list[int], bool]:
        """Untrusted text and what follows it in the layout, and whether it was cut.

        Args:
            text: Anything.
            max_length: At most this many tokens, the layout's own and the marker not counted.
        """
        ids = self._tokenizer.encode_untrusted(text + self._style.after_tag)
        if max_length is None or len(ids) <= max_length:
            return ids, False
        return [*ids[:max_length], *self.marker()], True

    def marker(self) -> list[int]:
        """What stands where something was cut."""
        return self._tokenizer.encode_untrusted(CUT + self._style.after_tag)
