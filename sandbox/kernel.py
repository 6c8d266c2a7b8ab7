"""Thin ctypes wrappers of the Linux calls that the standard library lacks.

Every function raises OSError where the kernel refuses, so that callers can probe; nothing here
decides what to do without a feature.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

IS_LINUX = sys.platform.startswith("linux")
MACHINE = platform.machine()

CLONE_VFORK = 0x00004000
CLONE_PARENT = 0x00008000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_TID_ADDRESS = 40
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

CAP_DAC_READ_SEARCH = 1 << 2

# (x86-64, aarch64): the numbers of the calls that libc has no wrapper for.
_NUMBERS = {
    "clone": (56, 220),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "seccomp": (317, 277),
    "close_range": (436, 436),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
_ZEROS = (0,) * 6
_COLUMN = {"x86_64": 0, "AMD64": 0, "aarch64": 1, "arm64": 1}.get(MACHINE)

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)
if IS_LINUX:
    for _library in (_libc, _libc_with_gil):
        _library.syscall.restype = ctypes.c_long
        _library.syscall.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * 6
    _libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    _libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
    _libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
    _libc.unshare.argtypes = [ctypes.c_int]


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def has_numbers() -> bool:
    """Whether the system-call numbers of this machine's architecture are known."""
    return IS_LINUX and _COLUMN is not None


def number(name: str) -> int:
    """Return the number of the named system call on this machine."""
    if _COLUMN is None:
        raise OSError(38, f"{name}: unknown on {MACHINE}")
    return _NUMBERS[name][_COLUMN]


def syscall_with_gil(*arguments: int) -> int:
    """Make a system call by number, all six arguments given; for the way of a child.

    What it takes is ready beforehand and the interpreter's lock is kept: each step that a child
    takes writes to pages, which are copied for it.
    """
    return _check(_libc_with_gil.syscall(*arguments), "system call")


def syscall(name: str, *args: int | ctypes.c_void_p | None) -> int:
    """Make the named system call; unused arguments are 0."""
    return _check(_libc.syscall(number(name), *args, *_ZEROS[len(args) :]), name)


def prctl(option: int, *args: int) -> int:
    """Call prctl."""
    padded = [*args, *[0] * (4 - len(args))]
    return _check(_libc.prctl(option, *padded), f"prctl {option}")


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags`."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount `source` on `target`."""
    encoded = [os.fsencode(x) if x is not None else None for x in (source, target, kind)]
    _check(_libc.mount(*encoded, flags, data.encode()), f"mount on {target}")


def umount(target: str, flags: int) -> None:
    """Unmount `target`."""
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root_here() -> None:
    """Make the current directory the root and let go of the old root."""
    path = ctypes.c_char_p(b".")
    address = ctypes.cast(path, ctypes.c_void_p)
    syscall("pivot_root", address, address)
    umount(".", MNT_DETACH)
    os.chdir("/")


def make_read_only(path: str) -> None:
    """Make a bind mount and everything under it read-only, without set-uid and devices."""
    wanted = MS_RDONLY | MS_NOSUID | MS_NODEV  # MOUNT_ATTR_* has the same values
    attributes = (ctypes.c_uint64 * 4)(wanted, 0, 0, 0)
    encoded = ctypes.c_char_p(os.fsencode(path))
    try:
        syscall(
            "mount_setattr",
            -100,
            ctypes.cast(encoded, ctypes.c_void_p),
            0x8000,  # AT_RECURSIVE
            ctypes.cast(attributes, ctypes.c_void_p),
            ctypes.sizeof(attributes),
        )
    except OSError:  # before Linux 5.12; flags that the host locked have to be repeated
        kept = os.statvfs(path).f_flag & (MS_NOEXEC | 1024 | 2048)
        mount(None, path, None, MS_REMOUNT | MS_BIND | wanted | kept)


def drop_capabilities(kept: int = 0) -> None:
    """Give up every capability but those in the bit mask `kept`, for good."""
    try:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError:
        pass
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # past the last capability, or none held to drop it with
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable
    syscall("capset", ctypes.cast(header, ctypes.c_void_p), ctypes.cast(rights, ctypes.c_void_p))


def fork() -> int:
    """Fork without the interpreter's own hooks; for a process with a single thread only.

    `os.fork` runs Python functions in parent and child (locks of `threading` and `logging`, new
    seeds) that serve processes with several threads. They write to about 120 pages, each of
    which is then copied: half of what a fork of the interpreter costs.
    """
    return _check(_libc_with_gil.fork(), "fork")


class SiblingFork:
    """Forks children of this process's own parent, and sleeps until each has ended.

    It sleeps inside the system call, so that it writes to no page that it shares with a child.
    For a process with a single thread only, like `fork`.
    """

    def __init__(self) -> None:
        flags = CLONE_VFORK | CLONE_PARENT | signal.SIGCHLD
        where = ctypes.c_void_p()
        try:  # libc keeps the thread's id at this place, and expects the child's own there
            prctl(PR_GET_TID_ADDRESS, ctypes.addressof(where))
            flags |= CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
        except OSError:
            pass
        tid = where.value or 0
        last = (0, tid) if _COLUMN else (tid, 0)  # the order of tid and tls differs
        self._call = (number("clone"), flags, 0, 0, *last, 0)

    def __call__(self) -> int:
        """Return 0 in the child; in this process its pid, once it has ended."""
        return syscall_with_gil(*self._call)


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    try:
        syscall("close_range", first, 0xFFFFFFFF, 0)
    except OSError:  # before Linux 5.9
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
