"""Attacks of our own, at least one per promise, in the full mode and without any namespace.

Each is (name, code, what has to hold); `attack_suite.faults` also checks after each that the
surroundings are unharmed, that no planted secret shows and that the next honest call is right.
"""
# ruff: noqa: E501 - a table of programs: cutting their lines would hide them

from __future__ import annotations

import os

import attack_suite
import pytest
from attack_suite import MODES, SHORT

from sandbox import PythonSandbox

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall.restype = ctypes.c_long\n"

# name, code, checks
TIME = [
    ("sleeps_with_all_signals_blocked", "import signal, time\n"
     "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: time.sleep(9)",
     {"status": ["timeout"]}),
    ("many_busy_threads", "import threading\ndef f():\n    while True: pass\n"
     "for _ in range(8): threading.Thread(target=f).start()", {"status": ["timeout"]}),
    ("waits_for_a_lock_of_its_own", "import threading\nl = threading.Lock()\nl.acquire()\n"
     "print('held', flush=True)\nl.acquire()", {"status": ["timeout"], "has": ["held"]}),
    ("backtracking_expression", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
     {"status": ["timeout"]}),
    ("constant_folded_tower", "9 ** 9 ** 9 ** 9", {"status": ["timeout", "error"]}),
    ("repr_never_ends", "class A:\n    def __repr__(s):\n        while True: pass\nA()",
     {"status": ["timeout"]}),
    ("exit_hook_never_ends", "import atexit\natexit.register(lambda: [0 for _ in iter(int, 1)])",
     {"status": ["timeout"]}),
    ("stops_itself_by_thread", "import signal\nsignal.raise_signal(signal.SIGSTOP)",
     {"status": ["timeout"]}),
    ("endless_read_of_nothing", "import os\nr, w = os.pipe()\nos.read(r, 1)",
     {"status": ["timeout"]}),
]  # fmt: skip
MEMORY = [
    ("string_doubling", "s = 'x'\nwhile True: s += s", {"status": ["error", "timeout"]}),
    ("deep_recursion_without_limit", "import sys\nsys.setrecursionlimit(1 << 30)\n"
     "class A:\n    def __getattr__(s, n): return getattr(s, n + 'x')\nA().x",
     {"status": ["crash", "error", "timeout"]}),
    ("memfd_by_number", LIBC + "print('GOT' + 'FD' if libc.syscall(319, b'x', 0) >= 0 else 1)",
     {"no": ["GOTFD"]}),
    ("many_small_files", "n = 0\ntry:\n    while True: open(f'f{n}', 'w').close(); n += 1\n"
     "except OSError: print('stopped', n < 5000)", {"has": ["stopped True"]}),
    ("sparse_giant_file", "f = open('big', 'wb')\nf.truncate(1 << 40)\nprint('GI' + 'ANT')",
     {"no": ["GIANT"], "status": ["output_limit", "error"]}),
    ("threads_with_tiny_stacks", "import threading, time\nthreading.stack_size(32768)\nn = 0\n"
     "try:\n    while n < 3000:\n"
     "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
     "except RuntimeError: pass\nprint('bounded', n < 2500)", {"has": ["bounded True"]}),
    ("many_descriptors", "import os\nn = 0\ntry:\n    while True: os.dup(1); n += 1\n"
     "except OSError: print('bounded', n < 1024)", {"has": ["bounded True"]}),
    ("pipes_hold_memory", "import os\nkept = 0\ntry:\n    while True:\n        r, w = os.pipe()\n"
     "        os.set_blocking(w, False)\n        kept += os.write(w, bytes(1 << 20))\n"
     "except OSError: print('bounded', kept < 64 << 20)", {"has": ["bounded True"]}),
]  # fmt: skip
PROCESSES = [
    ("fork_by_every_number", LIBC + "for n, a in ((57, 0), (58, 0), (56, 17), (435, 0)):\n"
     "    r = libc.syscall(n, a, 0, 0, 0, 0)\n    if r == 0: os._exit(0)\n"
     "    if r > 0: print('FOR' + 'KED', n)", {"no": ["FORKED"]}),
    ("thread_flag_without_shared_memory", LIBC + "r = libc.syscall(56, 0x10000 | 17, 0, 0, 0, 0)\n"
     "if r == 0: os._exit(0)\nprint('FOR' + 'KED' if r > 0 else 'denied')", {"no": ["FORKED"]}),
    ("spawn_and_pty", "import os, pty\nfor f in (lambda: os.posix_spawn('/bin/sh', ['sh'], {}), pty.fork):\n"
     "    try: f(); print('SPAW' + 'NED')\n    except OSError as e: print('denied')",
     {"no": ["SPAWNED"], "has": ["denied"]}),
    ("multiprocessing_pool", "import multiprocessing\ntry: multiprocessing.Pool(2); print('PO' + 'OL')\n"
     "except OSError: print('denied')", {"no": ["POOL"]}),
    ("executes_by_descriptor", LIBC + "fd = os.open(os.__file__, os.O_RDONLY)\n"
     "print('EX' + 'EC' if libc.syscall(322, fd, b'', 0, 0, 0x1000) == 0 else 'denied')",
     {"no": ["EXEC"]}),
    ("kills_its_group_and_everybody", "import os\nfor p in (0, -1, 1, os.getppid()):\n"
     "    try: os.kill(p, 9); print('SE' + 'NT', p)\n    except OSError: print('denied')",
     {"no": ["SENT"], "has": ["denied"]}),
    ("queues_a_signal", LIBC + "for p in (1, os.getppid()):\n"
     "    for n in (129, 297, 200, 424):\n"
     "        if libc.syscall(n, p, 9, 0, 0) == 0: print('SE' + 'NT')", {"no": ["SENT"]}),
    ("owner_of_a_pipe", "import fcntl, os\nr, w = os.pipe()\n"
     "for c in (8, 10, 15, 1024, 1026):\n    try: fcntl.fcntl(r, c, 1); print('OW' + 'NED', c)\n"
     "    except OSError: pass\ntry: fcntl.ioctl(r, 0x5452, b'\\1\\0\\0\\0'); print('OW' + 'NED')\n"
     "except OSError: pass", {"no": ["OWNED"]}),
    ("outlives_its_parent", LIBC + "print('CLEA' + 'RED' if libc.prctl(1, 0, 0, 0, 0) == 0 else 1)",
     {"no": ["CLEARED"]}),
    ("pins_and_reniceces_others", LIBC + "for p in (0, 1, os.getppid()):\n"
     "    if libc.syscall(203, p, 8, b'\\1' + bytes(7)) == 0: print('PIN' + 'NED')\n"
     "    if libc.setpriority(0, p, 19) == 0: print('NI' + 'CED')", {"no": ["PINNED", "NICED"]}),
    ("limits_of_others", "import os, resource\nfor p in (1, os.getppid() or 1):\n"
     "    try: resource.prlimit(p, resource.RLIMIT_CPU, (1, 1)); print('LIM' + 'ITED')\n"
     "    except OSError: print('denied')", {"no": ["LIMITED"]}),
]  # fmt: skip
OUTPUT = [
    ("flood_without_newline", "while True: print('x' * 65536, end='')",
     {"status": ["output_limit"], "maxout": 200_000}),
    ("flood_with_the_signal_ignored", "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
     "try:\n    while True: os.write(2, b'y' * 65536)\nexcept OSError: pass",
     {"status": ["output_limit"], "maxout": 200_000}),
    ("stream_made_longer_by_truncate", "import os\nos.truncate(1, 1 << 33)",
     {"status": ["error", "output_limit"]}),
    ("stream_made_shorter", "import os\nprint('one', flush=True)\nos.ftruncate(1, 0)\nprint('two')",
     {"status": ["ok"], "has": ["two"]}),
    ("stdout_deleted", "import sys\nprint('kept')\ndel sys.stdout, sys.stderr\nsys.__stdout__ = None",
     {"status": ["ok"], "has": ["kept"]}),
    ("stdout_replaced_by_nonsense", "import sys\nsys.stdout = 5\n1 / 0",
     {"status": ["error"], "has": ["ZeroDivisionError"]}),
    ("giant_value", "'v' * (20 << 20)", {"status": ["ok"], "maxout": 1000}),
    ("report_forged", "import gc, mmap, os\nfor o in gc.get_objects():\n"
     "    for m in (vars(o).values() if hasattr(o, '__dict__') and type(o) is not type else ()):\n"
     "        if type(m) is mmap.mmap: m[:] = bytes(len(m))\nos._exit(3)",
     {"status": ["error"]}),
    ("report_forged_as_unprepared", "import ctypes, gc, mmap, os\nfor o in gc.get_objects():\n"
     "    try: ms = [m for m in vars(o).values() if type(m) is mmap.mmap]\n"
     "    except TypeError: continue\n    for m in ms: m[:] = b'\\xff' * len(m)\nos._exit(125)",
     {"status": ["error"]}),
    ("frame_written_to_all", "import os, struct\nfor fd in range(3, 200):\n"
     "    try: os.write(fd, b'RP01' + bytes(60)); print('WRO' + 'TE')\n    except OSError: pass\n"
     "raise KeyError('true end')", {"status": ["error"], "has": ["true end"], "no": ["WROTE"]}),
]  # fmt: skip
EXIT = [
    ("abort", "import os\nos.abort()", {"status": ["crash"]}),
    ("dies_by_alarm", "import signal\nsignal.alarm(1)\nsignal.pause()", {"status": ["crash"]}),
    ("kills_itself", "import os\nos.kill(os.getpid(), 9)", {"status": ["crash"]}),
    ("jumps_into_nowhere", "import ctypes\nctypes.CFUNCTYPE(None)(64)()", {"status": ["crash"]}),
    ("other_architecture", "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
     "m.write(b'\\xb8\\x02\\0\\0\\0\\xcd\\x80\\xc3')\n"
     "r = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
     "print('FOR' + 'KED' if r > 0 else r)", {"no": ["FORKED"], "status": ["crash", "ok"]}),
    ("exit_in_a_thread", "import threading, os\nthreading.Thread(target=os._exit, args=(4,)).start()\n"
     "threading.Event().wait()", {"status": ["error"]}),
    ("modules_and_builtins_gone", "import sys, builtins\nsys.modules.clear()\n"
     "builtins.__dict__.clear()", {"status": ["ok", "error"]}),
    ("exception_with_hostile_class", "class M(type):\n    def __getattribute__(c, n): raise SystemError\n"
     "class E(Exception, metaclass=M): pass\nraise E", {"status": ["error"]}),
    ("exit_code_with_hostile_text", "class C:\n    def __str__(s): raise RuntimeError\nraise SystemExit(C())",
     {"status": ["error"]}),
    ("exception_group", "raise ExceptionGroup('many', [ValueError(str(i)) for i in range(10**4)])",
     {"status": ["error"], "has": ["many"], "maxout": 5000}),
    ("generator_and_interrupt", "raise GeneratorExit", {"status": ["error"]}),
]  # fmt: skip
SECRETS = [
    ("every_environment", "import glob\nfor p in ['/proc/self/environ', '/proc/1/environ', "
     "*glob.glob('/proc/[0-9]*/environ')]:\n    try: print(open(p).read())\n"
     "    except OSError: print('denied')", {}),
    ("own_environment_memory", "import ctypes, os\nprint(os.environ)\n"
     "e = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\ni = 0\n"
     "while e[i]: print(e[i]); i += 1", {}),
    ("token_by_links", "import os\nfor n, f in (('a', os.symlink), ('b', os.link)):\n"
     "    try: f('/tmp/rivet_home/.cache/huggingface/token', n); print(open(n).read())\n"
     "    except OSError: print('denied')", {}),
    ("walk_of_everything", "import os\nfor d, _, fs in os.walk('/'):\n    for f in fs:\n"
     "        if f in ('token', 'passwd', 'shadow', 'id_rsa'): print('FOU' + 'ND', d, f)",
     {"no": ["FOUND"], "status": ["ok", "timeout"]}),
    ("devices", "for p in ('/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/kvm', '/dev/fuse',"
     " '/dev/tty', '/dev/ptmx', '/dev/shm/x'):\n    try: open(p, 'r+b'); print('OPEN' + 'ED', p)\n"
     "    except OSError: print('denied')", {"no": ["OPENED"]}),
    ("other_memory_by_syscall", LIBC + "b = ctypes.create_string_buffer(64)\n"
     "for n in (101, 310, 311, 312, 438):\n    for p in (1, os.getppid()):\n"
     "        if libc.syscall(n, p, b, 1, b, 1, 0) > 0: print('REA' + 'CHED')", {"no": ["REACHED"]}),
]  # fmt: skip
FILES = [
    ("writes_outside_scratch", "import os, sys\nfor p in ('/x', '/etc/x', '/usr/x', '/dev/x', '/var/x', "
     "os.path.dirname(os.__file__) + '/x', '/tmp/rivet_canary/x', sys.prefix + '/x'):\n"
     "    try: open(p, 'w'); print('WRO' + 'TE', p)\n    except OSError: print('denied')",
     {"no": ["WROTE"], "has": ["denied"]}),
    ("modes_of_host_files", "import os\nfor p in ('/', '/tmp/rivet_canary', '/tmp/rivet_canary/file.txt', "
     "os.__file__):\n    try: os.chmod(p, 0o777); print('CHAN' + 'GED', p)\n"
     "    except OSError: print('denied')\n    try: os.utime(p, (0, 0)); print('CHAN' + 'GED', p)\n"
     "    except OSError: print('denied')", {"no": ["CHANGED"]}),
    ("removes_host_files", "import os, shutil\nfor p in ('/tmp/rivet_canary', os.path.dirname(os.__file__) + '/json'):\n"
     "    shutil.rmtree(p, ignore_errors=True)\n    try: os.rename(p, '/tmp/moved'); print('MO' + 'VED')\n"
     "    except OSError: print('denied')\nprint(os.path.exists(os.__file__))",
     {"no": ["MOVED"], "has": ["True"]}),
    ("special_files", "import os, socket\nfor f in (lambda: os.mkfifo('p'), lambda: os.mknod('n')):\n"
     "    try: f(); print('MA' + 'DE')\n    except OSError: print('denied')", {"no": ["MADE"]}),
    ("executable_scratch", "import mmap, os\ntry:\n    f = open('c', 'w+b'); f.write(bytes(4096)); f.flush()\n"
     "    mmap.mmap(f.fileno(), 4096, prot=5); print('MAP' + 'PED')\nexcept OSError: print('denied')",
     {"no": ["MAPPED"]}),
    ("climbs_out", "import os\nfor _ in range(30):\n    try: os.chdir('..')\n    except OSError: break\n"
     "print(os.path.exists('tmp/rivet_canary/file.txt') and open('tmp/rivet_canary/file.txt').read())",
     {"no": ["intact"], "status": ["ok", "error"]}),
]  # fmt: skip
NETWORK = [
    ("every_family", "import socket\nfor f in range(0, 46):\n    for t in (1, 2, 3, 5):\n"
     "        try: socket.socket(f, t); print('OPEN' + 'ED', f, t)\n        except OSError: pass",
     {"no": ["OPENED"]}),
    ("datagram_pair", "import socket\ntry: a, b = socket.socketpair(type=socket.SOCK_DGRAM); "
     "a.sendto(b'x', '/dev/log'); print('SE' + 'NT')\nexcept OSError: print('denied')",
     {"no": ["SENT"], "has": ["denied"]}),
    ("pair_passes_descriptors", "import socket\na, b = socket.socketpair()\n"
     "try: socket.send_fds(a, [b'x'], [0]); print('PAS' + 'SED')\nexcept OSError: print('denied')",
     {"no": ["PASSED"], "has": ["denied"]}),
    ("pair_connects_elsewhere", "import socket\na, b = socket.socketpair()\n"
     "for f in (lambda: a.connect('\\0x'), lambda: a.bind('\\0x'), lambda: a.listen()):\n"
     "    try: f(); print('CON' + 'NECTED')\n    except OSError: print('denied')",
     {"no": ["CONNECTED"]}),
    ("names_are_not_resolved", "import socket\ntry: print('RESOL' + 'VED', socket.getaddrinfo('example.org', 80))\n"
     "except OSError: print('denied')", {"no": ["RESOLVED"], "maxs": 5}),
    ("shared_memory_and_queues", LIBC + "for n in (29, 64, 68, 240):\n"
     "    if libc.syscall(n, 0x7ab1, 4096, 0o1666, 0) >= 0: print('SHA' + 'RED', n)",
     {"no": ["SHARED"], "ipcrm": 0x7AB1}),
]  # fmt: skip
# Numbers of x86-64: unshare, setns, mount and its new family, bpf, io_uring, perf, keys, ptrace,
# modules, kexec, swap, quota, clock, ports, personality, handles, watches, seccomp, landlock.
DENIED = (
    272, 308, 165, 166, 428, 429, 430, 431, 432, 433, 442, 321, 425, 426, 427, 298, 248, 249, 250,
    101, 175, 313, 176, 246, 320, 167, 168, 179, 164, 227, 159, 172, 173, 135, 303, 304, 253, 294,
    300, 317, 444, 445, 446, 434, 438, 440, 448, 103, 163, 171, 170, 161, 155, 105, 106, 113, 114,
    117, 119, 126, 133, 259, 188, 189, 190, 203, 144, 142, 278, 275, 276, 149, 151, 323, 237, 238,
    256, 279, 463,
)  # fmt: skip
KERNEL = [
    ("calls_outside_the_list", LIBC + f"for n in {DENIED}:\n    ctypes.set_errno(0)\n"
     "    r = libc.syscall(n, 0, 0, 0, 0, 0, 0)\n"
     "    if r >= 0 or ctypes.get_errno() not in (1, 38): print('ALLOW' + 'ED', n, ctypes.get_errno())",
     {"no": ["ALLOWED"]}),
    ("numbers_of_x32", LIBC + "for n in (0, 1, 41, 57, 59, 101, 520, 521):\n"
     "    if libc.syscall(0x40000000 + n, 1, 1, 0) >= 0: print('ALLOW' + 'ED', n)",
     {"no": ["ALLOWED"]}),
    ("rights", "import os\nfor f in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),\n"
     "          lambda: os.setresuid(0, 0, 0), lambda: os.chroot('/tmp'), lambda: os.nice(-5)):\n"
     "    try: f(); print('GAI' + 'NED')\n    except OSError: print('denied')", {"no": ["GAINED"]}),
    ("limits_cannot_grow", "import resource as r\nfor n in ('AS', 'CPU', 'NOFILE', 'FSIZE', 'CORE', 'STACK'):\n"
     "    w = getattr(r, 'RLIMIT_' + n)\n    soft, hard = r.getrlimit(w)\n"
     "    try: r.setrlimit(w, (hard + 1, hard + 1)); print('RAI' + 'SED', n)\n"
     "    except (ValueError, OSError): print('denied')", {"no": ["RAISED"]}),
    ("dumpable_again", LIBC + "print('DUM' + 'PABLE' if libc.prctl(4, 1, 0, 0, 0) == 0 else 1)",
     {"no": ["DUMPABLE"]}),
]  # fmt: skip
FOLLOW = "import sympy, os, sys, decimal, random, gc, warnings, signal\nx = sympy.Symbol('x')\n" \
    "print(sympy.solve(x**2 - 4), os.umask(0o22), len(sys.path) > 1, decimal.getcontext().prec, " \
    "gc.isenabled(), os.environ.get('A'), signal.getsignal(signal.SIGTERM) == 0, sum([1, 2]))"  # fmt: skip
SAME = {"next": {"code": FOLLOW, "has": ["[-2, 2] 18 True 28 True None True 3"]}}
STATE = [
    ("interpreter_settings", "import sys, os, decimal, gc, signal, builtins, sympy\nos.umask(0)\nsys.path.clear()\n"
     "decimal.getcontext().prec = 3\ngc.disable()\nos.environ['A'] = '1'\n"
     "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nbuiltins.sum = max\nsympy.solve = len", SAME),
    ("scratch_made_unusable", "import os\nos.chmod('.', 0)", SAME),
    ("scratch_filled_and_locked", "import os\nfor i in range(40):\n    os.mkdir('d'); os.chdir('d')\n"
     "open('f', 'w')\nos.chmod('.', 0)", SAME),
    ("left_files", "for i in range(300):\n    open(f'n{i}', 'w').write('LE' + 'FT')",
     {"next": {"code": "import glob\n[open(f).read() for f in glob.glob('/tmp/**', recursive=True) "
               "if f[-3:-2] == 'n' or f[-2:-1] == 'n']", "no": ["LEFT"]}}),
]  # fmt: skip
ALL = {
    "time": TIME, "memory": MEMORY, "processes": PROCESSES, "output": OUTPUT, "exit": EXIT,
    "secrets": SECRETS, "files": FILES, "network": NETWORK, "kernel": KERNEL, "state": STATE,
}  # fmt: skip
ATTACKS = attack_suite.parameters(ALL)
# What the reduced mode does not promise: it has no scratch to fill.
NEEDS_SCRATCH = {
    "many_small_files",
    "scratch_made_unusable",
    "scratch_filled_and_locked",
    "left_files",
}


@pytest.fixture(scope="module")
def victim():
    with attack_suite.surroundings() as process:
        yield process


@pytest.fixture(scope="module")
def attacked(victim):
    with PythonSandbox(SHORT, slots=1) as box:
        yield box


@pytest.fixture(scope="module")
def attacked_without_namespaces(victim):
    with PythonSandbox(SHORT, slots=1, _disabled=MODES["no-namespaces"]) as box:
        yield box


@pytest.mark.parametrize("case", ATTACKS)
def test_attack_fails(attacked, case, victim):
    assert attack_suite.faults(attacked, case, victim) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTACKS)
def test_attack_fails_without_namespaces(attacked_without_namespaces, case, victim):
    if case["id"] in NEEDS_SCRATCH:
        pytest.skip("there is no scratch folder without a mount namespace")
    assert attack_suite.faults(attacked_without_namespaces, case, victim) == []


SCAN = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
first, second = {halves!r}  # never joined here: the scan would find itself
r, w = os.pipe()
found = 0
def scan(low, high):
    global found
    for page in range(low, high, 4096):
        if libc.write(w, ctypes.c_void_p(page), 4096) != 4096: continue
        for part in os.read(r, 4096).split(first)[1:]:
            if part.startswith(second): found += 1
top = libc.sbrk(0)
scan((top - (48 << 20)) & ~4095, top & ~4095)
for near in (id(object()), id([]), id('x' * 5000)):
    scan((near & ~4095) - (24 << 20), (near & ~4095) + (24 << 20))
print('found', found)
"""


def test_memory_holds_nothing_of_an_earlier_call(attacked):
    secret = "only-the-first-call-may-know-this"
    attacked.run_sync(f"x = '{secret}'\nprint(x)\nraise ValueError(x)")
    scan = SCAN.format(halves=(secret[:12].encode(), secret[12:].encode()))
    assert attacked.run_sync(scan).text() == "found 0"
    own = attacked.run_sync(f"x = bytearray(b'{secret}')\n{scan}")
    assert own.text() != "found 0"  # the scan does find what is there


def test_no_process_and_descriptor_is_left_behind():
    before = sorted(os.listdir("/proc/self/fd"))
    with PythonSandbox(SHORT, slots=2) as box:
        assert box._zygote is not None
        pids = [box._zygote.pid, *attack_suite.descendants(box._zygote.pid)]
        assert len(pids) >= 2
        box.run_sync("import os\nos.mkdir('d')")
        box.run_sync("import os\nos.kill(os.getpid(), 9)")
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_descriptors_stay_flat_over_many_calls(attacked):
    attacked.run_sync("1")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("1", "1/0", "import os\nos.mkdir('d')", "import os\nos._exit(1)") * 25:
        attacked.run_sync(code)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_mounted_on_the_host(attacked):
    with open("/proc/self/mounts") as mounts:
        before = mounts.read()
    attacked.run_sync("import os\nos.mkdir('d')")
    with open("/proc/self/mounts") as mounts:
        assert mounts.read() == before
