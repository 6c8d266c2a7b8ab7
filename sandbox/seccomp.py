"""The system-call filters, assembled by hand as classic BPF and installed through ctypes.

A slot installs `slot_filter` once: an allow-list. Its children inherit it and stack
`ChildFilter` on top, which takes away what only the slot needs and names the child's own pid
as the only one that it may signal. Where both apply, the kernel takes the stricter answer.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from sandbox import kernel
from sandbox.syscalls import ALLOWED, CHECKED, METADATA, NOT_IMPLEMENTED, OPENING, SLOT_ONLY

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERRNO | errno.EPERM
_MISSING = _ERRNO | errno.ENOSYS
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_AUDIT_ARCH = {0: 0xC000003E, 1: 0xC00000B7}

_CLONE_THREAD, _CLONE_VM = 0x00010000, 0x00000100
_CLONE_NEW_MASK = 0x7E020080  # every CLONE_NEW* flag, the time namespace included
_O_ASYNC = 0o20000
_AF_UNIX, _SOCK_STREAM = 1, 1

# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: nothing that injects or configures
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ.
# F_SETOWN and F_SETSIG are missing: with them the *kernel* signals any process. So are, as is
# `flock`, the locks of open files: these outlive a process that shares the open file with others.
_FCNTLS = (0, 1, 2, 3, 5, 6, 7, 1030, 1032)
_F_SETFL = 4
# get dumpable, set and get name, get seccomp, get no_new_privs
_PRCTLS = (3, 15, 16, 21, 39)
_PR_SET_PDEATHSIG = 1  # the slot's alone: a child must not outlive its slot

_PID_MARK = 0x7FFF5AFE  # no pid is as large
_WORD = struct.Struct("<I")

Instruction = tuple[int, int, int, int]


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _give(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _low(argument: int) -> Instruction:
    return _load(_OFFSET_ARGS + 8 * argument)


def _high(argument: int) -> Instruction:
    return _load(_OFFSET_ARGS + 8 * argument + 4)


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow when the low half of the argument, which is all the kernel reads, is in `values`."""
    code = [_low(argument)]
    for value in values:
        code += [(_JUMP_EQ, 0, 1, value), _give(_ALLOW)]
    return [*code, _give(_DENY)]


def _rule(name: str) -> list[Instruction]:
    """Return the checks of one call in CHECKED; they end in an answer on every path."""
    if name == "ioctl":
        return _one_of(1, _IOCTLS)
    if name == "fcntl":
        set_flags = [
            _low(1), (_JUMP_EQ, 0, 4, _F_SETFL),
            _low(2), (_JUMP_SET, 0, 1, _O_ASYNC), _give(_DENY), _give(_ALLOW),
        ]  # fmt: skip
        return [*set_flags, *_one_of(1, _FCNTLS)]
    if name == "clone":
        return [_low(0), (_JUMP_SET, 0, 1, _CLONE_NEW_MASK), _give(_DENY), _give(_ALLOW)]
    if name == "prctl":
        return _one_of(0, (_PR_SET_PDEATHSIG, *_PRCTLS))
    if name == "prlimit64":
        return [_low(0), (_JUMP_EQ, 0, 1, 0), _give(_ALLOW), _give(_DENY)]
    if name == "socketpair":
        # streams only: a datagram socket can be sent to the address of another socket
        return [
            _low(0), (_JUMP_EQ, 1, 0, _AF_UNIX), _give(_DENY),
            _low(1), (_AND, 0, 0, 0xF), (_JUMP_EQ, 0, 1, _SOCK_STREAM), _give(_ALLOW),
            _give(_DENY),
        ]  # fmt: skip
    if name == "sendto":
        return [
            _low(4), (_JUMP_EQ, 1, 0, 0), _give(_DENY),
            _high(4), (_JUMP_EQ, 1, 0, 0), _give(_DENY), _give(_ALLOW),
        ]  # fmt: skip
    return [_give(_ALLOW)]  # kill and tgkill: the child's own filter narrows them


def _column(table: dict[str, tuple[int | None, int | None]]) -> dict[str, int]:
    column = kernel._COLUMN
    assert column is not None
    numbers = {name: pair[column] for name, pair in table.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _prologue() -> list[Instruction]:
    """Kill what uses another architecture's calls; refuse x32, whose numbers start at 2**30."""
    assert kernel._COLUMN is not None
    code = [
        _load(_OFFSET_ARCH),
        (_JUMP_EQ, 1, 0, _AUDIT_ARCH[kernel._COLUMN]),
        _give(_KILL),
        _load(_OFFSET_NR),
    ]
    return [*code, (_JUMP_GE, 0, 1, 0x40000000), _give(_MISSING)]


def _on_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body`, which ends in an answer, for this call alone."""
    return [(_JUMP_EQ, 0, len(body), number), *body]


def slot_filter(*, may_open: bool = True, may_change_metadata: bool = True) -> bytes:
    """Return the allow-list for slot and child together.

    Args:
        may_open: whether files can be opened, made and removed (something else confines that).
        may_change_metadata: whether modes and times can be changed.
    """
    code = _prologue()
    for name, number in _column(CHECKED).items():
        code += _on_call(number, _rule(name))
    for number in _column(NOT_IMPLEMENTED).values():
        code += _on_call(number, [_give(_MISSING)])
    allowed = ALLOWED | SLOT_ONLY
    allowed |= OPENING if may_open else {}
    allowed |= METADATA if may_change_metadata else {}
    numbers = sorted(_column(allowed).values())
    for first, last in _ranges(numbers):
        # below `first`: skip; above `last`: skip; else allow
        code += [(_JUMP_GE, 0, 2, first), (_JUMP_GE, 1, 0, last + 1), _give(_ALLOW)]
    return _assemble([*code, _give(_DENY)])


class ChildFilter:
    """The filter that a child stacks on its slot's: threads yes, processes no.

    It is assembled once, in the slot; a child only writes its pid into it, since everything it
    computes costs it copied pages.
    """

    def __init__(self) -> None:
        column = _column({**CHECKED, **SLOT_ONLY})
        code = _prologue()
        for name in SLOT_ONLY:
            code += _on_call(column[name], [_give(_DENY)])
        threads = _CLONE_THREAD | _CLONE_VM
        thread_only = [(_JUMP_EQ, 0, 1, threads), _give(_ALLOW), _give(_DENY)]
        code += _on_call(column["clone"], [_low(0), (_AND, 0, 0, threads), *thread_only])
        code += _on_call(column["prctl"], _one_of(0, _PRCTLS))
        for name in ("kill", "tgkill"):
            code += _on_call(column[name], _one_of(0, (_PID_MARK,)))
        code.append(_give(_ALLOW))
        self._program = Program(_assemble(code))
        self._places = [8 * i + 4 for i, step in enumerate(code) if step[3] == _PID_MARK]

    def install(self, pid: int) -> None:
        """Apply the filter to this process, whose pid it is, for good."""
        for place in self._places:
            _WORD.pack_into(self._program.code, place, pid)
        self._program.install()


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _assemble(code: list[Instruction]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


class Program:
    """An assembled filter in the form that the kernel takes."""

    def __init__(self, code: bytes) -> None:
        self.code = ctypes.create_string_buffer(code, len(code))
        header = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(self.code))
        self._header = ctypes.create_string_buffer(header, len(header))
        self._call = (kernel.number("seccomp"), 1, 0, ctypes.addressof(self._header), 0, 0, 0)

    def install(self) -> None:
        """Apply the filter to this process (single-threaded) and to what it forks, for good."""
        kernel.syscall_with_gil(*self._call)


def is_supported() -> bool:
    """Whether this kernel filters system calls (asked, without installing anything)."""
    if not kernel.has_numbers():
        return False
    action = ctypes.c_uint32(_KILL)
    try:  # SECCOMP_GET_ACTION_AVAIL
        kernel.syscall("seccomp", 2, 0, ctypes.cast(ctypes.pointer(action), ctypes.c_void_p))
    except OSError:
        return False
    return True
