"""A second suite of attacks: variations on each kind, to hold the kind and not the instance.

The form and the checks are those of `test_sandbox_attacks.py`. A program that gets what it must
not have prints BROKEN; the word is put together at run time, so that an echo of the source
cannot look like it.
"""
# ruff: noqa: E501 - a table of programs: cutting their lines would hide them

from __future__ import annotations

import os

import attack_suite
import pytest
from attack_suite import MODES, SHORT

from sandbox import PythonSandbox

LIBC = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "libc.syscall.restype = ctypes.c_long\nB = 'BRO' + 'KEN'\n"
)
TRY = (
    "import os\nB = 'BRO' + 'KEN'\n"
    "def t(name, f):\n"
    "    try: f()\n"
    "    except BaseException as e: print('denied', name)\n"
    "    else: print(B, name)\n"
)
NO = {"no": ["BROKEN"]}
DENIED = {"no": ["BROKEN"], "has": ["denied"]}

ESCAPE = [
    ("native_code_forks", "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
     "m.write(bytes.fromhex('b8390000000f05c3'))\n"
     "r = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
     "print('BRO' + 'KEN' if r >= 0 else r)", NO),
    ("namespaces_again", LIBC + "for f in (0x10000000, 0x20000000, 0x20000, 0x40000000, 0x4000000, 0x8000000, 0x2000000, 0x80, 0x10020000):\n"
     "    if libc.unshare(f) == 0 or libc.syscall(56, f | 17, 0, 0, 0, 0) >= 0: print(B, f)\n"
     "for n in (308, 155, 161, 165, 166): \n    if libc.syscall(n, 0, 0, 0, 0, 0) >= 0: print(B, n)", NO),
    ("template_forks_again", LIBC + "for f in (0x4000 | 0x8000 | 17, 0x8000 | 17, 0x4000 | 17, 0x4100 | 17, 0x100 | 17, 0x300 | 17, 0x10000, 0x10000 | 0x4000):\n"
     "    r = libc.syscall(56, f, 0, 0, 0, 0, 0)\n    if r == 0: os._exit(0)\n"
     "    if r > 0: print(B, f)", NO),
    ("high_half_of_an_argument", LIBC + "for n, a in ((62, 1), (234, 1), (157, 1), (302, 1)):\n"
     "    if libc.syscall(n, ctypes.c_long((1 << 32) | a), 0, 0, 0) == 0: print(B, n)\n"
     "r = libc.syscall(56, ctypes.c_long((1 << 32) | 17), 0, 0, 0, 0)\nif r == 0: os._exit(0)\n"
     "if r > 0: print(B)", NO),
    ("signals_to_every_pid", LIBC + "me = os.getpid()\nfor p in (*range(-40, 40), -2**31, 2**31 - 1):\n    if p == me: continue\n"
     "    for s in (0, 9, 18, 19):\n"
     "        if libc.kill(p, s) == 0: print(B, p, s)\n"
     "        if libc.syscall(200, p, s) == 0 or libc.syscall(234, p, p, s) == 0: print(B, 't', p, s)", NO),
    ("signal_by_a_terminal_or_group", TRY + "t('setpgid', lambda: os.setpgid(0, 1))\nt('setsid', os.setsid)\n"
     "t('killpg', lambda: os.killpg(0, 9))\nt('killpg1', lambda: os.killpg(1, 9))\n"
     "t('tcsetpgrp', lambda: os.tcsetpgrp(1, 1))", DENIED),
    ("timers_that_signal_others", LIBC + "ev = (ctypes.c_int * 16)(0, 0, 9, 4, 1)\nout = ctypes.c_int()\n"
     "if libc.syscall(222, 1, ev, ctypes.byref(out)) == 0: print(B)", NO),
    ("descriptors_of_others", LIBC + "for p in range(0, 30):\n    if p == os.getpid(): continue\n"
     "    if libc.syscall(434, p, 0) >= 0: print(B, 'pidfd', p)\n"
     "for fd in range(0, 64):\n    if libc.syscall(438, fd, 0, 0) >= 0: print(B, 'getfd', fd)\n"
     "print(sorted(fd for fd in range(256) if libc.fcntl(fd, 1) >= 0))", {"no": ["BROKEN"], "has": ["[0, 1, 2]"]}),
    ("interfaces_for_memory", LIBC + "for n in (101, 310, 311, 312, 323, 425, 426, 427, 447, 440, 462, 319, 437):\n"
     "    if libc.syscall(n, 0, 0, 0, 0, 0, 0) >= 0: print(B, n)", NO),
    ("set_user_ids", TRY + "for n, f in (('setuid', lambda: os.setuid(0)), ('seteuid', lambda: os.seteuid(0)), ('setreuid', lambda: os.setreuid(0, 0)),\n"
     "             ('setgroups', lambda: os.setgroups([0])), ('initgroups', lambda: os.initgroups('root', 0)), ('chroot', lambda: os.chroot('.'))): t(n, f)\n"
     "print(os.getuid() != 0)", {"no": ["BROKEN"], "has": ["denied", "True"]}),
    ("interpreter_of_the_host", TRY + "import subprocess, sys\nfor p in (sys.executable or '/usr/bin/python3', '/bin/sh', '/lib64/ld-linux-x86-64.so.2'):\n"
     "    t(p, lambda: os.execv(p, [p]))\n    t(p, lambda: subprocess.run([p, '-c', '1']))\nt('system', lambda: os.system('true') == 0 or 1 / 0)\n"
     "t('popen', lambda: os.popen('echo x').read() or 1 / 0)", DENIED),
]  # fmt: skip
READING = [
    ("proc_by_every_name", TRY + "for p in ('/proc/self/maps', '/proc/self/environ', '/proc/1/root/etc/passwd', '/proc/self/root/../etc/passwd', '/proc/thread-self/environ',\n"
     "          '/proc/kcore', '/proc/self/mem', '/sys/kernel/notes', '/proc/sys/kernel/hostname'):\n"
     "    t(p, lambda: open(p, 'rb').read(1))", DENIED),
    ("paths_that_climb", TRY + "import sys\nfor base in ('/tmp', '/usr/lib', os.path.dirname(os.__file__)):\n"
     "    for tail in ('/../' * 12 + 'etc/passwd', '/../' * 12 + 'root/.bashrc', '/../' * 12 + 'tmp/rivet_home/.cache/huggingface/token'):\n"
     "        t(base + tail, lambda: open(base + tail).read())", DENIED),
    ("descriptor_relative", TRY + "d = os.open('/', os.O_RDONLY)\nfor p in ('etc/passwd', '../etc/shadow', 'tmp/rivet_home/.cache/huggingface/token', 'var'):\n"
     "    t(p, lambda: os.listdir(os.open(p, os.O_RDONLY, dir_fd=d)) or 1 / 0)\n"
     "    t(p, lambda: os.read(os.open(p, os.O_RDONLY, dir_fd=d), 9))", DENIED | {"status": ["ok", "error"]}),
    ("handles_of_files", LIBC + "h = ctypes.create_string_buffer(b'\\x80\\0\\0\\0', 136)\nm = ctypes.c_int()\n"
     "if libc.syscall(303, -100, b'/', h, ctypes.byref(m), 0) == 0 or libc.syscall(304, -100, h, 0) >= 0: print(B)", NO),
    ("native_open", LIBC + "for n, a in ((2, (b'/etc/passwd', 0)), (257, (-100, b'/etc/passwd', 0)), (437, (-100, b'/etc/passwd', bytes(24), 24)), (85, (b'/etc/x', 0o600))):\n    if libc.syscall(n, *a) >= 0: print(B, n)", NO),
    ("secrets_in_frames_and_heap", "import gc, os, sys\nseen = []\nf = sys._getframe()\nwhile f: seen.append(repr(f.f_locals)[:2000]); f = f.f_back\n"
     "print(len(seen), dict(os.environ), os.environb)\nfor o in gc.get_objects():\n    if type(o) is dict and 'FAKE_API_KEY' in o: print(o)\nprint(sys.argv, sys.orig_argv)", {}),
    ("core_dump_and_crash_report", "import faulthandler, resource, sys\nfaulthandler.enable()\n"
     "print(resource.getrlimit(resource.RLIMIT_CORE), flush=True)\nfaulthandler._sigsegv()", {"status": ["crash"], "has": ["(0, 0)"]}),
]  # fmt: skip
EXHAUSTION = [
    ("shared_anonymous_memory", "import mmap\nkept = []\ntry:\n    while True:\n        m = mmap.mmap(-1, 64 << 20); m[::1 << 16] = b'x' * (len(m) >> 16); kept.append(m)\n"
     "except (OSError, MemoryError, ValueError): print('bounded', len(kept) < 40)", {"status": ["ok"], "has": ["bounded True"]}),
    ("memory_through_the_output_file", "import os, mmap\ntry: os.posix_fallocate(1, 0, 1 << 33)\nexcept OSError as e: print('denied')\n"
     "try: mmap.mmap(1, 1 << 30)\nexcept (OSError, ValueError): print('denied')", {"status": ["ok", "output_limit", "crash"], "maxout": 200_000}),
    ("holes_before_the_output", "import os\nos.lseek(1, 3 << 20, 0)\nprint('end', flush=True)", {"status": ["ok"], "has": ["end"], "maxout": 200_000}),
    ("nested_lists", "x = []\nfor _ in range(10**6): x = [x]\nx", {"status": ["ok", "error", "crash", "timeout"]}),
    ("huge_integer_text", "x = 10 ** 90_000\nprint(len(str(x)))\ny = 1 << 50_000_000\nstr(y)", {"status": ["error", "timeout"], "has": ["90001"]}),
    ("decompression", "import zlib\nd = zlib.compress(bytes(1 << 24), 9)\nfor _ in range(9):\n    d = zlib.decompress(d) * 64", {"status": ["error", "timeout", "crash"]}),
    ("unpickled_call", "import pickle\nclass E:\n    def __reduce__(s): return eval, (\"open('/etc/passwd').read()\",)\npickle.loads(pickle.dumps(E()))", {"status": ["error"], "no": ["root:"]}),
    ("format_width", "'%1000000000d' % 5", {"status": ["error", "ok", "timeout"], "maxout": 3000}),
    ("descriptor_kinds", "import os, select\nn = 0\ntry:\n    while True:\n        (os.eventfd, lambda _: os.pipe(), lambda _: select.epoll())[n % 3](0); n += 1\n"
     "except OSError: print('bounded', n < 500)", {"has": ["bounded True"]}),
    ("links_and_long_names", "import os\nopen('f', 'w').close()\nn = 0\ntry:\n    while n < 9000: os.link('f', 'l' * 240 + str(n)); n += 1\nexcept OSError: pass\nprint('bounded', n < 5000)", {"has": ["bounded True"]}),
    ("scratch_to_the_brim", "n = 0\ntry:\n    while True:\n        with open(f'b{n}', 'wb') as f: f.write(bytes(1 << 20))\n        n += 1\nexcept OSError: pass\nprint('bounded', n < 200)", {"has": ["bounded True"]}),
    ("threads_that_start_threads", "import threading, time\ndef f():\n    while True:\n        try: threading.Thread(target=f, daemon=True).start()\n        except RuntimeError: time.sleep(1)\nf()", {"status": ["timeout", "error", "crash"]}),
    ("main_thread_leaves", LIBC + "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\nlibc.syscall(60, 0)", {"status": ["timeout"]}),
    ("cpu_signal_ignored", "import signal\nfor s in (signal.SIGXCPU, signal.SIGALRM, signal.SIGTERM, signal.SIGVTALRM, signal.SIGPROF):\n    signal.signal(s, signal.SIG_IGN)\nwhile True: pass", {"status": ["timeout"]}),
    ("exception_never_prints", "class E(Exception):\n    def __str__(s):\n        while True: pass\nraise E", {"status": ["timeout"]}),
    ("finaliser_never_ends", "class A:\n    def __del__(s):\n        while True: pass\na = A()\ndel a", {"status": ["timeout"]}),
    ("import_lock_held", "import _imp, threading\n_imp.acquire_lock()\nt = threading.Thread(target=lambda: __import__('this_is_no_module')); t.start(); t.join()", {"status": ["timeout", "ok", "error"]}),
]  # fmt: skip
FORGERY = [
    ("result_class_faked", "class ExecutionResult:\n    status = 'sandbox_failure'\n    def __repr__(s): return 'ExecutionResult(status=' + repr(s.status) + ')'\nExecutionResult()", {"status": ["ok"]}),
    ("value_that_fights_its_text", "class S(str):\n    def encode(s, *a, **k): raise SystemExit(0)\n    def __len__(s): return -1\nclass A:\n    def __repr__(s): return S('x')\nA()", {"status": ["ok", "error"]}),
    ("value_is_no_text", "class A:\n    def __repr__(s): return 5\nA()", {"status": ["error"], "has": ["TypeError"]}),
    ("exit_codes", "import os\nos._exit(256 + 125)", {"status": ["error"]}),
    ("exit_of_the_unprepared", "import os\nos._exit(125)", {"status": ["error"]}),
    ("bytes_that_are_no_text", "import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\x00\\xed\\xa0\\x80')\nprint('\\ud800', '\\0', chr(0x10ffff))", {"status": ["ok"]}),
    ("control_characters_and_direction", "print('\\x1b]0;x\\x07\\x1b[2J\\u202e\\u0000\\r\\x08')", {"status": ["ok"]}),
    ("streams_closed_and_reopened", "import os, sys\nfor fd in (0, 1, 2): os.close(fd)\nr, w = os.pipe()\nos.dup2(w, 1)\nprint('lost')\n1 / 0", {"status": ["error"], "has": ["ZeroDivisionError"]}),
    ("streams_swapped", "import os\nos.dup2(1, 9); os.dup2(2, 1); os.dup2(9, 2)\nprint('crossed', flush=True)", {"status": ["ok"], "has": ["crossed"]}),
    ("runner_taken_apart", "import gc, sys, types\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nfor o in gc.get_objects():\n    if type(o) is types.FunctionType and o.__module__ and o.__module__.startswith('sandbox'):\n        try: o.__code__ = (lambda *a, **k: 0).__code__\n        except ValueError: pass", {"status": ["ok", "error", "crash"]}),
    ("builtins_replaced", "import builtins\nfor n in ('len', 'min', 'repr', 'getattr', 'isinstance', 'print', 'type', 'str', 'bytes'):\n    setattr(builtins, n, lambda *a, **k: 10**9)\n5", {"status": ["ok", "error"]}),
    ("late_output", "import atexit, threading, time\natexit.register(print, 'at exit')\nthreading.Thread(target=lambda: (time.sleep(.05), print('thread'))).start()\nprint('main')", {"status": ["ok"], "has": ["main", "thread", "at exit"]}),
    ("error_that_forges_lines", "raise ValueError('x\\nTraceback (most recent call last):\\n  File \"<cell>\", line 9')", {"status": ["error"], "maxout": 2100}),
    ("nested_causes", "e = None\nfor i in range(3000):\n    n = ValueError(str(i)); n.__cause__ = e; e = n\nraise e", {"status": ["error"], "maxout": 2100}),
    ("cause_in_a_ring", "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a", {"status": ["error"]}),
    ("hostile_notes", "e = ValueError('m')\ne.__notes__ = [object(), 5, 'n' * 10**6]\nraise e", {"status": ["error"], "maxout": 2100}),
    ("traceback_of_strange_code", "exec(compile('\\n' * 10**6 + '1/0', '/etc/passwd', 'exec'))", {"status": ["error"], "no": ["root:"]}),
    ("exits_in_odd_ways", "raise SystemExit(2 ** 80)", {"status": ["error"]}),
    ("coroutine_left", "async def f(): pass\nf()", {"status": ["ok"]}),
]  # fmt: skip
_LOOK = "import fcntl, os, signal, threading\nprint(fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND), os.getpriority(0, 0), " \
    "signal.pthread_sigmask(0, []), signal.getitimer(0), os.getcwd(), os.listdir('.') and sorted(n for n in os.listdir('.') if 'mine' in n), threading.active_count())"  # fmt: skip
# A fresh child is as nice as whoever runs the tests.
_FRESH = {"code": _LOOK, "has": [f"0 {os.nice(0)} set() (0.0, 0.0)"], "no": ["mine"]}
LINGERING = [
    ("flags_of_the_input", "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)", {"next": _FRESH}),
    ("locks_on_files_of_the_host", TRY + "import fcntl, struct\nfor p in ('/dev/null', os.__file__):\n    d = os.open(p, os.O_RDONLY)\n"
     "    t('flock', lambda: fcntl.flock(d, fcntl.LOCK_EX))\n    t('ofd', lambda: fcntl.fcntl(d, 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0)))\n    t('lease', lambda: fcntl.fcntl(d, 1024, 0))",
     DENIED),
    ("masks_and_timers", "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nsignal.setitimer(signal.ITIMER_REAL, 1)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)", {"next": _FRESH}),
    ("names_in_the_scratch", "import os\nfor n in ('mine', 'mine\\udcff', 'mine\\n', '.mine', 'mine' * 60):\n    open(n, 'w').write('x')\nos.symlink('/etc/passwd', 'mine-link')\nos.link('mine', 'mine-2')", {"next": _FRESH}),
    ("folders_in_the_scratch", "import os\nos.makedirs('mine/a/b')\nos.symlink('..', 'mine/a/up')\nos.chmod('mine/a', 0)", {"next": _FRESH}),
    ("file_kept_open_and_removed", "import mmap, os\nf = open('mine', 'w+b'); f.write(bytes(1 << 20)); f.flush()\nm = mmap.mmap(f.fileno(), 1 << 20)\nos.unlink('mine')\nos._exit(0)", {"next": _FRESH}),
    ("times_of_the_scratch", "import os\nos.utime('.', (0, 0))", {"next": _FRESH}),
    ("libraries_patched", "import json, math, sympy, numpy, sys\njson.dumps = math.sqrt = sympy.Symbol = None\nnumpy.array = 5\nsys.modules['fractions'] = None\nnumpy.random.seed(7)",
     {"next": {"code": "import json, fractions, numpy, sympy, random\nprint(json.dumps([1]), fractions.Fraction(1, 2), numpy.array([1]).sum(), sympy.Symbol('q'), numpy.random.randint(1000))", "has": ["[1] 1/2 1 q 684"]}}),
    ("cache_poisoned", "import sympy\nfrom sympy.core.cache import clear_cache\nsympy.core.numbers.Integer.__add__ = lambda a, b: sympy.Integer(7)\nsympy.S.Zero.p = 5\nclear_cache()",
     {"next": {"code": "import sympy\nprint(sympy.Integer(2) + sympy.Integer(2), sympy.S.Zero)", "has": ["4 0"]}}),
    ("immortal_objects_changed", "import ctypes\nn = id(5)\nctypes.c_long.from_address(n + 24).value = 6", {"next": {"code": "print(2 + 3, 5)", "has": ["5 5"]}}),
    ("stopped_at_the_end", "import os, signal\nprint('x', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)", {"status": ["timeout"], "next": {"code": "print(4)", "has": ["4"]}}),
]  # fmt: skip
ALL = {
    "escape": ESCAPE, "reading": READING, "exhaustion": EXHAUSTION, "forgery": FORGERY,
    "lingering": LINGERING,
}  # fmt: skip
ATTACKS = attack_suite.parameters(ALL)
NEEDS_SCRATCH = {"links_and_long_names", "scratch_to_the_brim", "names_in_the_scratch",
                 "folders_in_the_scratch", "file_kept_open_and_removed", "times_of_the_scratch",
                 "flags_of_the_input", "masks_and_timers"}  # fmt: skip


@pytest.fixture(scope="module")
def victim():
    with attack_suite.surroundings() as process:
        yield process


@pytest.fixture(scope="module")
def attacked(victim):
    with PythonSandbox(SHORT, slots=1) as box:
        yield box


@pytest.fixture(scope="module", params=MODES)
def attacked_with_less(victim, request):
    with PythonSandbox(SHORT, slots=1, _disabled=MODES[request.param]) as box:
        yield box


@pytest.mark.parametrize("case", ATTACKS)
def test_attack_fails(attacked, case, victim):
    assert attack_suite.faults(attacked, case, victim) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTACKS)
def test_attack_fails_with_less(attacked_with_less, case, victim):
    if case["id"] in NEEDS_SCRATCH and attacked_with_less.layers["missing"].get("scratch"):
        pytest.skip("there is no scratch folder without a mount namespace")
    assert attack_suite.faults(attacked_with_less, case, victim) == []
