"""The layout of the zygote's memory, which decides what a fork costs.

A fork copies a page-table entry for each 4 KiB of memory that was written to, but one for each
2 MiB where that is a whole, aligned huge page. So everything that the imports allocate goes into
one contiguous heap, which is then collapsed into huge pages. Each step is tried; where libc or
the kernel lack it, forks are slower and nothing else changes.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_PROT_READ, _PROT_EXEC = 1, 4
_M_TOP_PAD, _M_MMAP_THRESHOLD = -2, -3  # of mallopt
_DEFAULT = 128 << 10  # of both
_POOL, _POOL_HEADER = 16 << 10, 48  # bytes: blocks of one size share an aligned pool
_BLOCK, _LARGEST_BLOCK = 16, 512  # bytes: the small objects come in multiples of the one
_MOST_GAPS = 4096  # of one size, in case that the allocator is another one

_libc = ctypes.CDLL(None)
for _call in (_libc.madvise, _libc.mprotect):
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_Mapping = collections.namedtuple("_Mapping", "start end rights file")


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator: where the interpreter gets its megabytes for small objects."""

    _fields_ = [("ctx", ctypes.c_void_p), ("alloc", ctypes.c_void_p), ("free", ctypes.c_void_p)]


@contextlib.contextmanager
def one_heap() -> Iterator[None]:
    """Let everything that is allocated meanwhile come from libc's heap, in one piece.

    Otherwise each arena is a mapping of its own between those of the libraries, few of them at
    an address where a huge page may begin.
    """
    if not hasattr(_libc, "mallopt"):  # not glibc
        yield
        return
    before = _ArenaAllocator()
    ctypes.pythonapi.PyObject_GetArenaAllocator(ctypes.byref(before))
    # Called as alloc(ctx, size), which is aligned_alloc's form. An arena that is freed later is
    # unmapped by the allocator of before, which is safe: libc never touches what it gave away.
    address = ctypes.cast(_libc.aligned_alloc, ctypes.c_void_p).value
    ours = _ArenaAllocator(_POOL, address, before.free)
    _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    _libc.mallopt(_M_TOP_PAD, HUGE_PAGE)
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(ours))
    try:
        yield
    finally:
        ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(before))
        _libc.mallopt(_M_MMAP_THRESHOLD, _DEFAULT)
        _libc.mallopt(_M_TOP_PAD, _DEFAULT)


def fill_gaps() -> None:
    """Use up the free blocks between small objects, so that what comes next lies together.

    A child's new objects would otherwise fill gaps all over the heap, each on a page that is
    copied for it. Fresh pools, where the interpreter goes on once no gap is left, give out
    their blocks in order. The blocks taken here are never given back.
    """
    allocate = ctypes.pythonapi.PyObject_Malloc
    allocate.restype, allocate.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    for size in range(_BLOCK, _LARGEST_BLOCK + 1, _BLOCK):
        first = [_POOL_HEADER + i * size for i in range(3)]  # of a pool that nothing is in yet
        last: list[int] = []
        for _ in range(_MOST_GAPS):
            last = [*last[-2:], allocate(size) % _POOL]
            if last == first:
                break


def immortalise() -> None:
    """Let the interpreter count no references to what exists now, where it can (Python 3.12).

    A reference count is a write: whatever a child merely looks at lies on a page that is then
    copied for it. Objects that are marked like `None` are left alone, and live forever.
    """
    forever = sys.getrefcount(None)
    field = ctypes.c_uint32.from_address
    if forever < 1 << 30 or field(id(None)).value != forever:  # counted, or counted elsewhere
        return
    todo = gc.get_objects()
    while todo:
        found = []
        for thing in todo:
            if sys.getrefcount(thing) < 1 << 30:
                field(id(thing)).value = forever
                found.append(thing)
        todo = gc.get_referents(*found)


def round_up_heap() -> None:
    """Let the heap end where a huge page ends; libc goes on behind it."""
    _libc.sbrk.restype = ctypes.c_ssize_t
    _libc.sbrk.argtypes = [ctypes.c_ssize_t]
    end = _libc.sbrk(0)
    if end > 0:
        _libc.sbrk(-end % HUGE_PAGE)


def join_code() -> None:
    """Map each library's code and the constants on both sides of it as one.

    A fork copies, and an exit removes, every mapping, most of which are parts of libraries.
    The constants become executable; nothing becomes writable.
    """
    mappings = _mappings()
    for before, code, after in zip(mappings, mappings[1:], mappings[2:], strict=False):
        is_one_file = before.file == code.file == after.file != ""
        is_in_a_row = before.end == code.start and code.end == after.start
        rights = before.rights, code.rights, after.rights
        if is_one_file and is_in_a_row and rights == ("r--p", "r-xp", "r--p"):
            _libc.mprotect(before.start, after.end - before.start, _PROT_READ | _PROT_EXEC)


def _mappings() -> list[_Mapping]:
    """Return the mappings of this process in order of their addresses."""
    with open("/proc/self/maps") as maps:
        lines = maps.read().splitlines()
    mappings = []
    for line in lines:
        ends, rights, _, _, _, *file = line.split(maxsplit=5)
        start, end = (int(x, 16) for x in ends.split("-"))
        mappings.append(_Mapping(start, end, rights, "".join(file)))
    return mappings


def huge_page_ranges() -> list[tuple[int, int]]:
    """Return (address, length) of the private writable memory that fills whole huge pages."""
    ranges = []
    for mapping in _mappings():
        if mapping.file not in ("", "[heap]") or mapping.rights != "rw-p":
            continue
        start = (mapping.start + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
        end = mapping.end // HUGE_PAGE * HUGE_PAGE
        if end > start:
            ranges.append((start, end - start))
    return ranges


def collapse(ranges: list[tuple[int, int]]) -> None:
    """Back these ranges by huge pages, where the kernel agrees."""
    for start, length in ranges:
        for page in range(start, start + length, HUGE_PAGE):
            if _libc.madvise(page, HUGE_PAGE, _MADV_COLLAPSE) != 0:  # before Linux 6.1
                _libc.madvise(page, HUGE_PAGE, _MADV_HUGEPAGE)
