"""Run untrusted Python locally: isolated, limited, fresh for each call, and fast.

`PythonSandbox` is the whole interface; `docs/sandbox.md` has the threat model. The package needs
the standard library only, imports nothing else of this repository and can be used on its own.
"""

from sandbox.client import PythonSandbox
from sandbox.result import ExecutionResult, SandboxError, SandboxLimits, Status

__all__ = ["ExecutionResult", "PythonSandbox", "SandboxError", "SandboxLimits", "Status"]
