"""A completion as text: pieces with one author and one kind, as it is sampled or afterwards.

A token's kind can depend on what follows it (`<pyth` may become a tag), so while a completion is
under way its last few tokens are held back. Put together, the pieces of a live completion are
those of the finished one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rivet.protocol import Scanner
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, Kind, Trajectory


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text with one author and one kind.

    Attributes:
        author: Who wrote it.
        kind: What it is; tags are `format`.
        text: As it stands in the completion: text of the environment and of experts is escaped
            where it would read as a tag.
        expert: The name, within the request to an expert and within its reply; else None.
    """

    author: Author
    kind: Kind
    text: str
    expert: str | None = None


class PieceReader:
    """Turns the tokens of one completion into pieces while they come.

    Args:
        tokenizer: The controller's.
    """

    def __init__(self, tokenizer: ProtocolTokenizer) -> None:
        self._tokenizer = tokenizer
        self._scanner = Scanner(tokenizer)
        self._tokens: list[tuple[int, Author]] = []  # not given out yet
        self._given = 0  # tokens given out
        self._at = 0  # their bytes
        # A character may be cut by the end of a piece; the next piece gets it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int], author: Author) -> list[Piece]:
        """Take tokens of one author, shape (n,); give the pieces that are certain by now."""
        self._scanner.feed(ids, author)
        self._tokens += [(token, author) for token in ids]
        return self._take(self._scanner.settled() - self._given)

    def finish(self) -> list[Piece]:
        """The rest, at the end of the completion."""
        pieces = self._take(len(self._tokens))
        cut = self._decoder.decode(b"", final=True)
        if cut and pieces:
            pieces[-1] = replace(pieces[-1], text=pieces[-1].text + cut)
        return pieces

    def _take(self, count: int) -> list[Piece]:
        if count <= 0:
            return []
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        kinds = self._scanner.kinds(self._given)
        self._given += count
        return merged(
            Piece(author, kind, self._decoder.decode(piece), self._expert_at(len(piece)))
            for (token, author), kind in zip(taken, kinds, strict=False)
            for piece in (self._tokenizer.bytes_of((token,)),)
        )

    def _expert_at(self, length: int) -> str | None:
        """Whose request or reply the next token begins in; steps over the token."""
        start, self._at = self._at, self._at + length
        for span in self._scanner.spans:
            if span.expert and span.start <= start and (start < span.end or not span.is_closed):
                return span.expert
        return None


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours that share author and kind; format pieces belong to no expert."""
    result: list[Piece] = []
    for piece in pieces:
        if piece.kind in ("format", "route"):
            piece = replace(piece, expert=None)
        last = result[-1] if result else None
        if last and (last.author, last.kind) == (piece.author, piece.kind):
            result[-1] = replace(last, text=last.text + piece.text)
        else:
            result.append(piece)
    return result


def pieces_of(trajectory: Trajectory, tokenizer: ProtocolTokenizer) -> list[Piece]:
    """The completion of a finished trajectory, one piece a segment."""
    reader = PieceReader(tokenizer)
    pieces: list[Piece] = []
    for segment in trajectory.segments:
        pieces += reader.feed(segment.ids, segment.author)
    return merged([*pieces, *reader.finish()])
