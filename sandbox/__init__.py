"""Run untrusted Python locally: isolated, limited, fresh for each call, and fast.

`PythonSandbox` is the whole interface; `docs/sandbox.md` has the threat model. The package needs
the standard library only, imports nothing else of this repository and can be used on its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.client import PythonSandbox
    from sandbox.result import ExecutionResult, SandboxError, SandboxLimits, Status

__all__ = ["ExecutionResult", "PythonSandbox", "SandboxError", "SandboxLimits", "Status"]


def __getattr__(name: str) -> Any:
    """Import on use: the zygote needs no client, and would carry asyncio into every child."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "PythonSandbox":
        from sandbox.client import PythonSandbox

        return PythonSandbox
    from sandbox import result

    return getattr(result, name)
