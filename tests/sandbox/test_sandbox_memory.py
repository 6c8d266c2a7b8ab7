"""The layout of the memory that children are copies of, and the rehearsal that warms it.

Each test runs in a process of its own: what is done to the memory is done for good.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    """Return what `code` prints in a fresh interpreter that can import the sandbox."""
    prefix = f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", prefix + code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_new_objects_lie_in_a_row_once_gaps_are_filled():
    code = """
from sandbox import memory
size = 200 - sys.getsizeof(b'')
objects = [bytes(size) for _ in range(5000)]
del objects[::7]
memory.fill_gaps()
new = [bytes(size) for _ in range(8)]
print({id(b) - id(a) for a, b in zip(new, new[1:])})
"""
    assert run(code) == "{208}"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="every reference is counted before 3.12")
def test_references_to_what_is_immortal_are_not_counted():
    code = """
from sandbox import memory
def old(): return 1
memory.immortalise()
before = sys.getrefcount(old), sys.getrefcount(old.__code__), sys.getrefcount([])
many = [old, old.__code__] * 1000
print(before == (sys.getrefcount(old), sys.getrefcount(old.__code__), sys.getrefcount([])))
print(sys.getrefcount(old) == sys.getrefcount(None), sys.getrefcount(many) < 9)
"""
    assert run(code) == "True\nTrue True"


def test_nothing_is_marked_where_references_are_counted_or_the_layout_is_another():
    code = """
from sandbox import memory
sys.getrefcount = lambda thing: 5000
memory.immortalise()
def new(): return 1
import ctypes
print(ctypes.c_uint32.from_address(id(new)).value < 100)
"""
    assert run(code) == "True"


def test_joined_mappings_are_fewer_and_none_is_both_writable_and_executable():
    code = """
from sandbox import memory
before = memory._mappings()
memory.join_code()
after = memory._mappings()
print(len(after) <= len(before) - 2, [m for m in after if 'w' in m.rights and 'x' in m.rights])
print({m.rights for m in before if 'w' in m.rights} == {m.rights for m in after if 'w' in m.rights})
import sympy  # what was joined still works
"""
    assert run(code) == "True []\nTrue"


def test_a_rehearsal_leaves_streams_and_descriptors_alone_whatever_its_cells_do():
    code = """
from sandbox.template import rehearse
before = sorted(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/1')
rehearse(["print('shown')", "import nothing_of_this_name", "x = 1\\nimport sys\\nsys.exit(3)"])
after = sorted(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/1')
print(before == after, 'x' in vars(sys.modules['__main__']))
"""
    assert run(code) == "True False"
