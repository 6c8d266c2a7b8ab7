"""Landlock: the kernel's own file, port and signal rules, which hold without any privilege.

In the full mode it repeats what the mount namespace already enforces; without user namespaces
it is what keeps files and sockets of the host out of reach. Rules exist per ABI version: what
this kernel does not know is left out, and `Ruleset.abi` says which version applied.
"""

from __future__ import annotations

import ctypes
import os
import struct

from sandbox import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_MAKE_SPECIAL = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # char device, socket, fifo, block device


def abi() -> int:
    """Return the version of landlock that this kernel has, 0 without it."""
    try:
        return kernel.syscall("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def restrict(readable: list[str], writable: list[str]) -> int:
    """Leave this process and its children only these paths, no ports, no outside signals.

    Args:
        readable: files and folders to read; code in them may be mapped. Absent ones are skipped.
        writable: files and folders to read and write; nothing special can be made in them.

    Returns:
        The ABI version that applied.

    Raises:
        OSError: when the kernel has no landlock, or refuses.
    """
    version = abi()
    if version < 1:
        raise OSError(38, "landlock: not in this kernel")
    files = max(mask for since, mask in _ALL_BY_ABI.items() if since <= version)
    ports = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("<QQQ", files, ports, scopes)[
        : 8 * (1 + (version >= 4) + (version >= 6))
    ]
    holder = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = kernel.syscall(
        "landlock_create_ruleset", ctypes.cast(holder, ctypes.c_void_p), len(attributes), 0
    )
    try:
        for path in readable:
            _allow(ruleset, path, _READ & files)
        for path in writable:
            _allow(ruleset, path, files & ~_MAKE_SPECIAL & ~_EXECUTE)
        kernel.syscall("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        where = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # absent on this machine, or closed to this user: then it needs no rule
        return
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, where), 12)
        kernel.syscall("landlock_add_rule", ruleset, 1, ctypes.cast(rule, ctypes.c_void_p), 0)
    finally:
        os.close(where)
