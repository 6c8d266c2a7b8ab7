"""Who outlives whom: the owner's death, forks of the owner, threads, a busy owner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attack_suite
import pytest
from attack_suite import MODES

from sandbox import PythonSandbox, SandboxError

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
from sandbox import PythonSandbox
box = PythonSandbox(slots=2, _disabled={disabled!r})
box.start()
for code in ("import time\\ntime.sleep(60)", "while True: pass"):
    threading.Thread(target=box.run_sync, args=(code,), daemon=True).start()
{extra}
print(box._zygote.pid, flush=True)
time.sleep(60)
"""
# A forked helper keeps a copy of every socket of its dead parent open.
FORKED_HELPER = "if os.fork() == 0: time.sleep(60)"


def wait_until(condition, seconds: float = 20.0) -> bool:
    """Return whether `condition` comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        threading.Event().wait(0.01)
    return bool(condition())


def run_until_closed(box: PythonSandbox, code: str) -> None:
    """Run `code` in a sandbox that another thread closes meanwhile."""
    with contextlib.suppress(SandboxError):
        box.run_sync(code)


def gone(pids: list[int]) -> bool:
    """Whether none of the processes is left."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("disabled", [(), MODES["no-namespaces"]], ids=["full", "reduced"])
def test_everything_ends_with_its_owner(how, disabled):
    check_death(OWNER.format(root=str(ROOT), disabled=disabled, extra=""), how)


def test_a_fork_of_the_owner_keeps_nothing_alive():
    code = OWNER.format(root=str(ROOT), disabled=(), extra=FORKED_HELPER)
    check_death(code, signal.SIGKILL)


def check_death(code: str, how: int) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert owner.stdout is not None
        zygote = int(owner.stdout.readline())
        assert wait_until(lambda: len(attack_suite.descendants(zygote)) >= 4)  # slots, children
        pids = [zygote, *attack_suite.descendants(zygote)]
        owner.send_signal(how)
        owner.wait()
        assert wait_until(lambda: gone(pids))
    finally:
        os.killpg(owner.pid, signal.SIGKILL) if owner.poll() is None else None
        for pid in attack_suite.session(owner.pid):
            os.kill(pid, signal.SIGKILL)


def test_death_of_the_zygote_ends_its_slots_and_their_children():
    with PythonSandbox(slots=1) as box:
        assert box._zygote is not None
        # retried in a new zygote after this one's death, until the sandbox is closed
        thread = threading.Thread(target=run_until_closed, args=(box, "while True: pass"))
        thread.start()
        zygote = box._zygote
        assert wait_until(lambda: len(attack_suite.descendants(zygote.pid)) >= 2)
        pids = attack_suite.descendants(zygote.pid)
        zygote.kill()
        assert wait_until(lambda: gone(pids))
        box.close()
        thread.join()


def test_a_forked_owner_is_told_to_open_its_own():
    with PythonSandbox(slots=1) as box:
        pid = os.fork()
        if pid == 0:
            try:
                box.run_sync("1")
            except SandboxError as error:
                os._exit(7 if "open one of its own" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert box.run_sync("1").text() == "1"


def test_it_opens_in_a_thread_that_ends():
    box = PythonSandbox(slots=1)
    thread = threading.Thread(target=box.start)
    thread.start()
    thread.join()
    try:
        assert box.run_sync("1").text() == "1"
    finally:
        box.close()


def test_a_trainer_with_torch_and_busy_threads_gets_a_process_without_either():
    torch = pytest.importorskip("torch")
    stop, steps, answers = threading.Event(), [0], {}

    def train() -> None:
        weight = torch.ones(64, 64, requires_grad=True)
        while not stop.is_set():
            (weight @ weight).sum().backward()
            steps[0] += 1

    def ask(i: int) -> None:
        answers[i] = box.run_sync(f"import sys\n{i} * 2, 'torch' in sys.modules").text()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        assert wait_until(lambda: steps[0] > 0)
        with PythonSandbox(slots=1) as box:
            assert box._zygote is not None
            zygote = Path(f"/proc/{box._zygote.pid}")
            assert "libtorch" in Path("/proc/self/maps").read_text()
            assert "libtorch" not in (zygote / "maps").read_text()
            assert len(os.listdir(zygote / "task")) == 1
            callers = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            done = steps[0]
            assert wait_until(lambda: steps[0] > done)
    finally:
        stop.set()
        trainer.join()
    assert answers == {i: f"({2 * i}, False)" for i in range(6)}


@pytest.fixture
def interruptible_process():
    """A background job of a shell starts with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible_process")
def test_interrupt_in_a_waiting_call_leaves_the_sandbox_usable():
    with PythonSandbox(slots=1) as box:

        def interrupt() -> None:
            assert wait_until(lambda: len(attack_suite.descendants(box._zygote.pid)) >= 2)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            box.run_sync("import time\ntime.sleep(9)")
        thread.join()
        assert box.run_sync("1").text() == "1"
