"""The frames between client and slot: one request in, one reply out, over a stream socket.

The reply's header is written by the slot, which is trusted; the text behind it comes from the
program that ran and is only ever decoded, never parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.result import STATUSES, Status

# magic, number of earlier cells, bytes that follow
REQUEST = struct.Struct("<4sII")
REQUEST_MAGIC = b"RQ01"
REQUEST_END = b"\n"  # the child takes it when it is ready to run foreign code
_CELL = struct.Struct("<I")

# magic, outcome, flags, exit detail, wall seconds, CPU seconds, bytes kept and bytes written of
# stdout and stderr, bytes of value and of error
REPLY = struct.Struct("<4sBBhddIIIIII")
REPLY_MAGIC = b"RP01"

OUTCOMES = STATUSES  # a status travels as its index
FLAG_RETIRING = 1  # the slot ends after this reply
FLAG_TRUNCATED = 2  # value or error was cut

HELLO = struct.Struct("<4sI")
HELLO_MAGIC = b"HI01"

MESSAGE_BYTES = 64  # of each message from client to zygote


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """The fixed part of a reply; `*_total` counts what was written, `*_kept` what follows."""

    outcome: Status
    is_retiring: bool
    is_truncated: bool
    detail: int
    duration_s: float
    cpu_s: float
    stdout_kept: int
    stdout_total: int
    stderr_kept: int
    stderr_total: int
    value_len: int
    error_len: int

    @property
    def body_len(self) -> int:
        """Bytes that follow the header."""
        return self.value_len + self.error_len + self.stdout_kept + self.stderr_kept

    def pack(self) -> bytes:
        """Return the header as bytes."""
        flags = FLAG_RETIRING * self.is_retiring | FLAG_TRUNCATED * self.is_truncated
        return REPLY.pack(
            REPLY_MAGIC,
            OUTCOMES.index(self.outcome),
            flags,
            self.detail,
            self.duration_s,
            self.cpu_s,
            self.stdout_kept,
            self.stdout_total,
            self.stderr_kept,
            self.stderr_total,
            self.value_len,
            self.error_len,
        )


def unpack_reply(data: bytes) -> ReplyHeader:
    """Return the header in `data`.

    Raises:
        ValueError: when the bytes are not a reply header.
    """
    magic, outcome, flags, *rest = REPLY.unpack(data)
    if magic != REPLY_MAGIC or outcome >= len(OUTCOMES):
        raise ValueError("not a reply header")
    retiring, truncated = bool(flags & FLAG_RETIRING), bool(flags & FLAG_TRUNCATED)
    return ReplyHeader(OUTCOMES[outcome], retiring, truncated, *rest)


def pack_request(code: str, prelude: Sequence[str]) -> bytes:
    """Return the frame that asks a slot to run `code` after the cells of `prelude`."""
    cells = [cell.encode("utf-8", "surrogatepass") for cell in (*prelude, code)]
    body = b"".join(_CELL.pack(len(cell)) + cell for cell in cells)
    return REQUEST.pack(REQUEST_MAGIC, len(prelude), len(body)) + body + REQUEST_END


def unpack_cells(body: bytes) -> list[str]:
    """Return the cells in the body of a request, the one to report last."""
    cells, at = [], 0
    while at < len(body):
        (length,) = _CELL.unpack_from(body, at)
        at += _CELL.size
        cells.append(body[at : at + length].decode("utf-8", "surrogatepass"))
        at += length
    return cells


def kept_parts(total: int, keep: int) -> list[tuple[int, int]]:
    """Return which (offset, length) parts of a stream are kept: all of it, or its two ends."""
    if total == 0:
        return []
    if total <= keep:
        return [(0, total)]
    head = keep * 3 // 4
    return [(0, head), (total - (keep - head), keep - head)]
