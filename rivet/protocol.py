r"""The interaction protocol: plain text tags in one assistant turn, read incrementally from tokens.

    <think> free reasoning </think>
    <expert name="algebra"> request </expert>
    <reply name="algebra"> text <python> code </python><output> printed </output> </reply>
    <python> code </python>
    <output> what the local sandbox printed </output>
    <answer> \boxed{...} </answer>  end of turn

The scanner takes tokens with their author and says, for each token, what kind it is, and, for the
whole, whether it follows the grammar. One grammar serves every mode; what differs is who writes the
reply: the engine intercepts at `</expert>` in `experts` mode, the controller goes on itself in
`local` mode. `<output>` is the environment's alone: a controller that opens one is fabricating.

Rules that callers rely on:
- A token that overlaps a tag is a `format` token (a `route` token where it overlaps the expert's
  name), whatever else it holds; the others have the kind of the span that they begin in.
- Inside think, request, code, output and answer spans only the span's own closing tag is a tag.
- An answer counts only in an answer span that the controller opens outside every other span,
  after the last of them was closed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, Kind, Segment, merge_runs

EXPERT_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
STOP_EXPERT = "</expert>"
STOP_PYTHON = "</python>"
STOP_OUTPUT = "<output>"

SpanKind = Literal["think", "expert", "reply", "python", "output", "answer"]
_SPAN_TO_KIND: dict[SpanKind, Kind] = {
    "think": "reasoning",
    "expert": "request",
    "reply": "reply",
    "python": "code",
    "output": "output",
    "answer": "answer",
}
_OPENERS = {
    None: re.compile(
        rb"<(?:(/)?(think|python|output|answer)|(/)(expert|reply)"
        rb'|(expert|reply) name="(' + EXPERT_NAME.encode() + rb')")>'
    ),
    "reply": re.compile(rb"<(?:(/)?(python|output)|(/)(reply))>"),
}
_WORD = re.compile(rb"\S+")
_BOX = re.compile(rb"\\boxed *\{")
# The longest tag that may still be incomplete at the end of the bytes seen so far.
_LONGEST_TAG = len('<expert name="">') + 64


@dataclass(frozen=True, slots=True)
class Span:
    """One closed or open span of the text. Offsets are bytes of the completion.

    Attributes:
        name: Which span.
        expert: The name in the opening tag of an expert or reply span, else empty.
        author: Who wrote its opening tag.
        start: First byte of the content.
        end: One past the last byte of the content; the end of the text while it is open.
        is_closed: Whether its closing tag was read.
        parent: Index of the reply span that encloses it, or None.
    """

    name: SpanKind
    expert: str
    author: Author
    start: int
    end: int
    is_closed: bool
    parent: int | None = None


class Scanner:
    """Reads one completion, token by token, and keeps its spans, kinds and grammar violations.

    Args:
        tokenizer: Gives the bytes of each token and the end-of-turn ids.
    """

    def __init__(self, tokenizer: ProtocolTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = bytearray()
        self._ids: list[int] = []
        self._authors: list[Author] = []
        self._logprobs: list[float | None] = []
        self._ends: list[int] = []
        self._marks: list[tuple[int, int, Kind]] = []  # byte ranges: tags, names, boxes, stray text
        self._stack: list[int] = []  # indices of the open spans, outermost first
        self._position = 0  # everything before it has been read
        self._tag_end = 0  # one past the last tag
        self._just_closed: int | None = None  # index of the span that the last tag closed
        self.spans: list[Span] = []
        self.violation = ""
        self.ended = False

    def feed(
        self, ids: Sequence[int], author: Author, logprobs: Sequence[float] | None = None
    ) -> None:
        """Append tokens of one author.

        Args:
            ids: Token ids, shape (n,).
            author: Who wrote them.
            logprobs: Sampling log-probabilities, shape (n,); None if they were not sampled.
        """
        for n, token in enumerate(ids):
            if self.ended:
                self._violate("text after the end of the turn")
            if token in self._tokenizer.eos_ids:
                self.ended = True
                self._read(final=True)
                start = len(self._text)
                self._text += self._tokenizer.bytes_of((token,))
                self._marks.append((start, len(self._text), "format"))
                self._position = len(self._text)
            else:
                self._text += self._tokenizer.bytes_of((token,))
            self._ids.append(token)
            self._authors.append(author)
            self._logprobs.append(None if logprobs is None else logprobs[n])
            self._ends.append(len(self._text))
        self._read(final=False)

    @property
    def current(self) -> Span | None:
        """The innermost open span, None at the top level."""
        return self.spans[self._stack[-1]] if self._stack else None

    @property
    def last_closed(self) -> Span | None:
        """The span that the last tag closed; None if the last tag opened one, or text followed."""
        if self._just_closed is None or self.trailing:
            return None
        return self.spans[self._just_closed]

    @property
    def trailing(self) -> str:
        """Text behind the last tag, white space removed: what a stop string overshot."""
        return bytes(self._text[self._tag_end :]).decode("utf-8", "replace").strip()

    def text(self, span: Span) -> str:
        """Content of a span, still escaped if its author is not the controller."""
        return bytes(self._text[span.start : span.end]).decode("utf-8", "replace")

    def answer(self) -> str | None:
        """Content of the controller's closed answer span, if no span follows it; else None.

        What was said before going on (consulting again, fabricating an output, opening another
        answer) is no answer: it must not be graded as one.
        """
        last = next((s for s in reversed(self.spans) if s.parent is None), None)
        if last is None or last.name != "answer":
            return None
        return self.text(last) if last.is_closed and last.author == "controller" else None

    def problem(self) -> str:
        """First grammar violation of the text as a whole, empty if it is well formed."""
        if self.violation:
            return self.violation
        if self._stack:
            return f"<{self.spans[self._stack[-1]].name}> is not closed"
        top = [s for s in self.spans if s.parent is None]
        if not top or top[-1].name != "answer":
            return "no <answer> at the end"
        if sum(s.name == "answer" for s in top) > 1:
            return "more than one <answer>"
        if not _BOX.search(self._text, top[-1].start, top[-1].end):
            return "no \\boxed{} in <answer>"
        if not self.ended:
            return "no end of turn"
        return self._unanswered()

    def _unanswered(self) -> str:
        """Every request has its reply and every program its output, directly behind it."""
        for n, span in enumerate(self.spans):
            if span.name not in ("expert", "python"):
                continue
            wanted: SpanKind = "reply" if span.name == "expert" else "output"
            after = [s for s in self.spans[n + 1 :] if s.parent == span.parent]
            if not after or after[0].name != wanted:
                return f"<{span.name}> is not followed by <{wanted}>"
        return ""

    def segments(self) -> tuple[Segment, ...]:
        """All tokens so far as segments; each token has exactly one author and one kind."""
        return merge_runs(self._ids, self._authors, self.kinds(), self._logprobs)

    def settled(self) -> int:
        """How many tokens have the kind that they will keep, whatever follows."""
        at = self._position
        if self._stack and self.spans[self._stack[0]].name == "answer":
            at = min(at, self.spans[self._stack[0]].start)  # its boxes are found when it closes
        return bisect_right(self._ends, at)

    def kinds(self, first: int = 0) -> list[Kind]:
        """Kind per token, shape (T - first,), from the token `first` on.

        Marks win over spans; a name wins over the tag around it.
        """
        base = self._ends[first - 1] if first else 0
        size = len(self._text) + 1 - base
        # White space between spans is structure; stray text there is marked by `_skip`.
        kind_of_byte: list[Kind] = ["format"] * size
        for span in self.spans:  # parents come before their children
            start, end = max(0, span.start - base), max(0, span.end - base)
            kind_of_byte[start:end] = [_SPAN_TO_KIND[span.name]] * (end - start)
        if self._stack:
            kind_of_byte[-1] = _SPAN_TO_KIND[self.spans[self._stack[-1]].name]
        marks: list[Kind | None] = [None] * size
        for start, end, kind in self._marks:
            start, end = max(0, start - base), max(0, end - base)
            marks[start:end] = [kind] * (end - start)
        kinds: list[Kind] = []
        start = 0
        for end in (end - base for end in self._ends[first:]):
            touched = marks[start:end]
            if "route" in touched:
                kinds.append("route")
            elif "format" in touched:
                kinds.append("format")
            elif "reasoning" in touched:
                kinds.append("reasoning")
            else:
                kinds.append(kind_of_byte[start])
            start = end
        return kinds

    def _violate(self, what: str) -> None:
        self.violation = self.violation or what

    def _author_at(self, offset: int) -> Author:
        """Author of the token that holds a byte of the text."""
        n = bisect_right(self._ends, offset)
        return self._authors[n] if n < len(self._authors) else self._authors[-1]

    def _read(self, *, final: bool) -> None:
        """Consume every complete tag; keep the end of open spans at the end of the text."""
        while self._read_tag(final=final):
            pass
        for n in self._stack:
            self._replace(n, end=len(self._text))

    def _read_tag(self, *, final: bool) -> bool:
        span = self.current
        if span is None or span.name == "reply":
            match = _OPENERS["reply" if span else None].search(self._text, self._position)
        else:
            closing = f"</{span.name}>".encode()
            match = re.compile(re.escape(closing)).search(self._text, self._position)
        if match is None:
            self._skip(len(self._text), final=final)
            return False
        self._skip(match.start(), final=True)
        self._position = self._tag_end = match.end()
        self._just_closed = None
        self._marks.append((match.start(), match.end(), "format"))
        if span is not None and span.name != "reply":
            self._close(span, match.start())
            return True
        groups = [g.decode() for g in match.groups() if g is not None]
        if groups[0] == "/":
            if span is not None and span.name == groups[1]:
                self._close(span, match.start())
            else:
                self._violate(f"</{groups[1]}> closes nothing")
            return True
        self._open(groups, match)
        return True

    def _skip(self, end: int, *, final: bool) -> None:
        """Pass over text that is no tag; at the top level only white space belongs there."""
        if not final:
            # A tag may be under way in the last bytes.
            cut = self._text.rfind(b"<", max(self._position, end - _LONGEST_TAG), end)
            end = cut if cut >= 0 else end
        if end <= self._position:
            return
        if not self._stack:
            for match in _WORD.finditer(self._text, self._position, end):
                self._violate("text outside every span")
                self._marks.append((*match.span(), "reasoning"))
        self._position = end

    def _open(self, groups: list[str], match: re.Match[bytes]) -> None:
        name: SpanKind = groups[0]  # type: ignore[assignment]
        expert = groups[1] if len(groups) > 1 else ""
        if expert:
            self._marks.append((*match.span(6), "route"))
        parent = self._stack[-1] if self._stack else None
        siblings = [s for s in self.spans if s.parent == parent]
        before = siblings[-1] if siblings else None
        author = self._author_at(match.start())
        if name == "reply" and (before is None or before.name != "expert"):
            self._violate("<reply> without a request")
        elif name == "reply" and before is not None and before.expert != expert:
            self._violate("<reply> names another expert than the request")
        if name == "output":
            if before is None or before.name != "python":
                self._violate("<output> without a program")
            if author != "environment":
                self._violate("<output> written by the model")
        if before is not None and before.name == "answer" and parent is None:
            self._violate(f"<{name}> after the answer")
        self.spans.append(Span(name, expert, author, match.end(), len(self._text), False, parent))
        self._stack.append(len(self.spans) - 1)

    def _close(self, span: Span, end: int) -> None:
        n = self._just_closed = self._stack.pop()
        self._replace(n, end=end, is_closed=True)
        if span.name == "answer":
            self._mark_boxes(span.start, end)

    def _mark_boxes(self, start: int, end: int) -> None:
        """`\\boxed{` and its closing brace are structure; what is inside is content."""
        for match in _BOX.finditer(self._text, start, end):
            self._marks.append((*match.span(), "format"))
            depth = 1
            for at in range(match.end(), end):
                depth += {ord("{"): 1, ord("}"): -1}.get(self._text[at], 0)
                if depth == 0:
                    self._marks.append((at, at + 1, "format"))
                    break

    def _replace(self, n: int, *, end: int, is_closed: bool = False) -> None:
        s = self.spans[n]
        self.spans[n] = Span(s.name, s.expert, s.author, s.start, end, is_closed, s.parent)


def parse(tokenizer: ProtocolTokenizer, ids: Sequence[int], authors: Sequence[Author]) -> Scanner:
    """Scan a finished completion, token ids and authors of shape (T,)."""
    scanner = Scanner(tokenizer)
    start = 0
    for n in range(1, len(ids) + 1):
        if n == len(ids) or authors[n] != authors[start]:
            scanner.feed(ids[start:n], authors[start])
            start = n
    return scanner


@dataclass(frozen=True, slots=True)
class Style:
    """How spliced spans are laid out.

    Attributes:
        after_tag: Follows every tag that we write. A newline keeps plain-text tags from merging
            with their neighbours (`>` and `<` are one token in many vocabularies); empty where
            each tag is a token of its own.
    """

    after_tag: str = "\n"

    def open(self, name: SpanKind, expert: str = "") -> str:
        """An opening tag as we write it."""
        return (f'<{name} name="{expert}">' if expert else f"<{name}>") + self.after_tag

    def close(self, name: SpanKind) -> str:
        """A closing tag as we write it."""
        return f"</{name}>" + self.after_tag


# Possessive quantifiers and the unclosed fence that takes the rest keep it linear for every text.
_FENCE = re.compile(
    r"^[ \t]*+(?P<fence>(?P<mark>[`~])(?P=mark){2,}+)[ \t]*+(?P<language>[^\s`]*+)[^`\n]*+\n"
    r"(?P<code>.*?)"
    r"(?:(?P<end>^[ \t]*+(?P=fence)(?P=mark)*+[ \t]*+$)|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("", "py", "python", "python3")  # languages of a fence that holds a program


def split_reply(text: str) -> list[tuple[Literal["text", "code"], str]]:
    """Split an expert's reply at its programs, in order, empty pieces dropped.

    A program is a fenced block of Markdown of the language Python or of none; its indentation in a
    list is taken off. Blocks of other languages, and one that is not closed, are text.
    """
    text = text.replace("\r\n", "\n")
    pieces: list[tuple[Literal["text", "code"], str]] = []
    position = 0
    for match in _FENCE.finditer(text):
        if match["end"] is None or match["language"].lower() not in _PYTHON:
            continue
        pieces.append(("text", text[position : match.start()].strip()))
        pieces.append(("code", dedent(match["code"]).removesuffix("\n")))
        position = match.end()
    pieces.append(("text", text[position:].strip()))
    return [(kind, piece) for kind, piece in pieces if piece]
