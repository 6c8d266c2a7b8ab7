"""Says which walls stand on this machine, which do not and why, and what that means.

It opens a sandbox and reports what the slot itself found while it set itself up, and then lets
programs try the promises: nothing is inferred from version numbers.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from sandbox import kernel, landlock
from sandbox.client import PythonSandbox
from sandbox.jail import LAYERS

# layer -> what it does, and what is lost without it
MEANING = {
    "user": ("user namespace", "no unprivileged namespaces for an ordinary user"),
    "mount": ("mount namespace", "no root of its own; landlock alone keeps files out of reach"),
    "pid": ("pid namespace", "host processes are visible by number; the filter denies signals"),
    "net": ("network namespace", "the filter alone denies sockets"),
    "ipc": ("IPC namespace", "the filter alone denies shared memory and queues"),
    "uts": ("host name namespace", "the host's name is readable"),
    "cgroup": ("cgroup namespace", "nothing that another layer does not hold"),
    "root": ("own root, read-only binds", "existence and size of host files can be asked"),
    "scratch": ("bounded scratch folder", "programs cannot write any file"),
    "uid": ("an ordinary uid", "programs run as the user who started the sandbox"),
    "capabilities": ("no capabilities", "other layers have to confine the rights that are left"),
    "landlock": ("landlock rules", "file access rests on the mount namespace alone"),
    "seccomp": ("system-call allow-list", "the kernel's whole surface is open: do not rely on it"),
    "limits": ("resource limits", "time and memory are not bounded"),
}
PROMISES = {
    "read a file of the host": "open('/etc/passwd').read(); print('BROKEN')",
    "open a socket": "import socket; socket.socket(); print('BROKEN')",
    "start a process": "import os; os.fork(); print('BROKEN')",
    "signal another process": "import os; os.kill(os.getppid() or 1, 0); print('BROKEN')",
    "take 4 GB of memory": "bytearray(4 << 30); print('BROKEN')",
    "write to the libraries": "import os; open(os.__file__, 'a'); print('BROKEN')",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    is_held: bool
    note: str


def examine() -> tuple[list[Finding], list[Finding]]:
    """Open a sandbox; return the findings on its walls and on the promises.

    Raises:
        SandboxError: when no sandbox can be opened here.
    """
    with PythonSandbox(slots=1) as box:
        assert box.layers is not None
        missing = box.layers["missing"]
        walls = [
            Finding(
                MEANING[layer][0],
                layer not in missing,
                f"{missing[layer]}: {MEANING[layer][1]}" if layer in missing else "",
            )
            for layer in LAYERS
        ]
        promises = []
        for name, code in PROMISES.items():
            result = box.run_sync(code)
            is_held = "BROKEN" not in result.stdout and result.status == "error"
            promises.append(Finding(f"cannot {name}", is_held, "" if is_held else result.text()))
    return walls, promises


def report() -> int:
    """Print the report; return 0 when every promise holds, else 1."""
    print(f"{platform.system()} {platform.release()} {platform.machine()}, "
          f"Python {platform.python_version()}, uid {os.getuid()}")  # fmt: skip
    print(f"landlock ABI {landlock.abi()}, system-call numbers "
          f"{'known' if kernel.has_numbers() else 'unknown'}, "
          f"huge pages {_huge_pages()}")  # fmt: skip
    walls, promises = examine()
    for title, findings in (("Walls", walls), ("Promises, tried just now", promises)):
        print(f"\n{title}")
        for finding in findings:
            note = f"  {finding.note}" if finding.note else ""
            print(f"  {'yes' if finding.is_held else 'NO ':4} {finding.name}{note}")
    is_reduced = not all(finding.is_held for finding in walls)
    is_held = all(finding.is_held for finding in promises)
    print()
    if not is_held:
        print("A promise is broken: do not run untrusted code here.")
    elif is_reduced:
        print("Reduced mode: the promises hold with fewer walls behind each other, see above.")
    else:
        print("Every wall stands.")
    return 0 if is_held else 1


def _huge_pages() -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as setting:
            return setting.read().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "unknown (forks cost more without them)"
