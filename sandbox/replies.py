"""Turns a slot's reply into the result that the caller gets."""

from __future__ import annotations

import signal

from sandbox import wire
from sandbox.result import ExecutionResult, SandboxLimits


def to_result(header: wire.ReplyHeader, body: bytes, limits: SandboxLimits) -> ExecutionResult:
    """Turn a reply into what the caller gets."""
    at, texts = 0, []
    for length in (header.value_len, header.error_len, header.stdout_kept, header.stderr_kept):
        texts.append(body[at : at + length])
        at += length
    value, error = (raw.decode("utf-8", "replace") for raw in texts[:2])
    stdout = _stream_text(texts[2], header.stdout_total, limits.stream_bytes)
    stderr = _stream_text(texts[3], header.stderr_total, limits.stream_bytes)
    error = error or _why(header, limits)
    if error and stderr and not stderr.endswith("\n"):
        stderr += "\n"
    is_cut = header.stdout_total > header.stdout_kept or header.stderr_total > header.stderr_kept
    return ExecutionResult(
        status=header.outcome,
        stdout=stdout,
        stderr=stderr + error,
        value_repr=value,
        duration_s=header.duration_s,
        cpu_s=header.cpu_s,
        truncated=header.is_truncated or is_cut,
        error=error,
    )


def _why(header: wire.ReplyHeader, limits: SandboxLimits) -> str:
    """Say what ended the code where it could not say so itself."""
    match header.outcome:
        case "timeout":
            return (
                f"TimeoutError: the code ran longer than its limit ({limits.cpu_s:g} s of CPU, "
                f"{limits.wall_s:g} s in all)"
            )
        case "crash":
            try:
                name = signal.Signals(header.detail).name
            except ValueError:
                name = f"signal {header.detail}"
            return f"the process was killed by {name}"
        case "output_limit":
            return f"the code wrote more than {limits.output_kill_bytes} bytes"
        case "error":
            return f"the process exited with code {header.detail}"
        case "sandbox_failure":
            return "the sandbox could not prepare the process"
    return ""


def _stream_text(kept: bytes, total: int, keep: int) -> str:
    if total <= len(kept):
        return kept.decode("utf-8", "replace")
    head = wire.kept_parts(total, keep)[0][1]
    note = f"\n... [{total - len(kept)} bytes left out] ...\n"
    return kept[:head].decode("utf-8", "replace") + note + kept[head:].decode("utf-8", "replace")
