"""What a caller sees: the limits that a sandbox enforces and the result of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "error", "timeout", "crash", "output_limit", "sandbox_failure"]

STATUSES: tuple[Status, ...] = (
    "ok",
    "error",
    "timeout",
    "crash",
    "output_limit",
    "sandbox_failure",
)


class SandboxError(RuntimeError):
    """The sandbox could not be started or used; never raised because of what the code did."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one call. Time counts from the start of the code, never from queueing.

    Attributes:
        cpu_s: CPU seconds, all threads together.
        wall_s: seconds on the clock.
        memory_mb: address space that the code may add to that of the interpreter, in MiB.
        stream_bytes: how much of stdout, of stderr and of the echoed value is kept.
        output_kill_bytes: a stream or a scratch file that grows past this ends the call.
        error_bytes: length of the error text.
        scratch_mb: size of the writable scratch folder, in MiB.
        threads: number of threads besides the main one.
        open_files: number of open file descriptors.
        int_digits: longest integer that is converted to or from text.
        code_bytes: longest source text, earlier cells included.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mb: int = 1024
    stream_bytes: int = 64 * 1024
    output_kill_bytes: int = 4 * 1024 * 1024
    error_bytes: int = 2048
    scratch_mb: int = 32
    threads: int = 64
    open_files: int = 128
    int_digits: int = 100_000
    code_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"SandboxLimits.{name} is {value!r}; expected a number above 0")
        if self.stream_bytes > self.output_kill_bytes:
            raise ValueError(
                f"SandboxLimits.stream_bytes is {self.stream_bytes}, more than output_kill_bytes "
                f"({self.output_kill_bytes}); expected at most that"
            )


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The outcome of one call.

    Attributes:
        status: `ok`; `error` (the code raised, or exited with a code other than 0); `timeout`
            (CPU or wall limit); `crash` (killed by a signal); `output_limit`; `sandbox_failure`
            (ours, already retried: says nothing about the code).
        stdout: what the code wrote, at most `stream_bytes` with a note where it was cut.
        stderr: the same for stderr, followed by the error text.
        value_repr: `repr` of the last expression, as a REPL echoes it; empty for None.
        duration_s: seconds on the clock from the start of the code.
        cpu_s: CPU seconds of the code.
        truncated: True when anything was cut.
        error: the error text alone: the last user frames and the message.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    value_repr: str = ""
    duration_s: float = 0.0
    cpu_s: float = 0.0
    truncated: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end without an error."""
        return self.status == "ok"

    def text(self, max_chars: int = 4000) -> str:
        """Return what a model is shown: stdout, the echoed value, the error, trimmed.

        Nothing decorates the output: `print(3)` gives `3`, and so does a last line `3`. Where
        the text is too long its middle is left out, so that both the beginning and the last
        lines, which often hold the answer or the error, stay.
        """
        parts = [part.rstrip("\n") for part in (self.stdout, self.value_repr, self.error)]
        return clip("\n".join(part for part in parts if part), max_chars)


def clip(text: str, max_chars: int) -> str:
    """Return `text` in at most `max_chars` characters, a note replacing its middle."""
    if len(text) <= max_chars:
        return text
    note = f"\n... [{len(text) - max_chars} characters left out] ...\n"
    room = max_chars - len(note)
    if room <= 0:
        return text[:max_chars]
    head = room * 2 // 3
    return text[:head] + note + text[len(text) - (room - head) :]
