"""The interface: results, limits, echo, replay, the queue, both calling styles."""

import asyncio
import errno
import os
import socket
import threading

import pytest

from sandbox import ExecutionResult, PythonSandbox, SandboxError, SandboxLimits


def test_print_shows_its_text_alone(box):
    result = box.run_sync("print(3)")
    assert (result.status, result.stdout, result.value_repr) == ("ok", "3\n", "")
    assert result.text() == "3"


def test_last_expression_is_echoed(box):
    assert box.run_sync("x = 2\nx + 1").text() == "3"


def test_none_is_not_echoed(box):
    assert box.run_sync("x = [2, 1]\nx.sort()").text() == ""


def test_echo_follows_the_syntax_tree_not_the_text(box):
    assert box.run_sync("max(\n  1,\n  7,\n)").value_repr == "7"
    assert box.run_sync("print(1); 5").text() == "1\n5"
    assert box.run_sync("if True:\n    5").text() == ""


def test_annotations_are_values_as_in_any_program(box):
    assert box.run_sync("x: int = 1\n__annotations__['x'] is int").text() == "True"


def test_error_shows_user_line_and_message_only(box):
    result = box.run_sync("def f(a):\n    return 1/a\nprint('before')\nf(0)")
    assert result.status == "error"
    assert result.stdout == "before\n"
    assert "return 1/a" in result.error and "ZeroDivisionError" in result.error
    assert "sandbox" not in result.stderr
    assert result.text().startswith("before\nTraceback")


def test_error_in_a_library_hides_host_paths(box):
    result = box.run_sync("from json import nothing_of_this_name")
    assert result.status == "error"
    assert os.path.dirname(os.__file__) not in result.error
    assert "nothing_of_this_name" in result.error


def test_long_error_is_cut_to_its_limit(box):
    result = box.run_sync("raise ValueError('Q' * 10**7)")
    assert len(result.error.encode()) <= box.limits.error_bytes
    assert "ValueError" in result.error and "raise ValueError" in result.error


def test_syntax_error_is_an_error(box):
    result = box.run_sync("x = = 1")
    assert result.status == "error" and "SyntaxError" in result.error


def test_exit_codes(box):
    assert box.run_sync("import sys; print(1); sys.exit()").status == "ok"
    assert box.run_sync("import sys; sys.exit('no')").status == "error"
    assert box.run_sync("import os; os._exit(77)").status == "error"
    assert box.run_sync("import os; print(1); os._exit(0)").status == "ok"
    crashed = box.run_sync("import ctypes; ctypes.string_at(0)")
    assert crashed.status == "crash" and "SIGSEGV" in crashed.error


def test_cpu_limit_keeps_partial_output(box):
    result = box.run_sync("print('half', end='')\nwhile True: pass")
    assert (result.status, result.stdout) == ("timeout", "half")


def test_wall_limit_ends_a_sleeper(box):
    result = box.run_sync("print('a')\nimport time\ntime.sleep(100)")
    assert (result.status, result.stdout) == ("timeout", "a\n")
    assert result.duration_s >= box.limits.wall_s


def test_memory_limit(box):
    result = box.run_sync("x = bytearray(2 << 30)")
    assert result.status == "error" and "MemoryError" in result.error
    assert box.run_sync("x = bytearray(64 << 20); len(x)").text() == str(64 << 20)


def test_output_flood_is_killed_and_kept_short(box):
    result = box.run_sync("while True: print('x' * 1000)")
    assert result.status == "output_limit" and result.truncated
    assert len(result.stdout) < box.limits.stream_bytes + 200


def test_long_output_keeps_both_ends(box):
    result = box.run_sync("for i in range(20000): print(i)")
    assert result.status == "ok" and result.truncated
    assert result.stdout.startswith("0\n1\n") and result.stdout.endswith("19999\n")
    assert "bytes left out" in result.stdout


def test_streams_are_apart(box):
    result = box.run_sync(
        "import sys\nprint('o')\nprint('e', file=sys.stderr)\nsys.stdout.write('')"
    )
    assert (result.stdout, result.stderr) == ("o\n", "e\n")


def test_state_is_fresh(box):
    box.run_sync("import sympy\nsympy.solve = None\nleft = 1\nopen('f', 'w').write('x')")
    result = box.run_sync(
        "import os, sympy\nprint(sympy.solve is None, 'left' in globals(), os.listdir('.'))"
    )
    assert "False False" in result.stdout and "'f'" not in result.stdout


def test_prelude_is_replayed_silently(box):
    result = box.run_sync("print(x + y)", prelude=["x = 1\nprint('no')", "y = 2\ny"])
    assert (result.status, result.stdout, result.value_repr) == ("ok", "3\n", "")


def test_limits_of_the_last_cell_are_not_stretched_by_a_prelude(box):
    result = box.run_sync("while True: pass", prelude=["x = 1"] * 5)
    assert result.status == "timeout"
    assert result.cpu_s < 2.5 * box.limits.cpu_s


def test_stdin_is_empty(box):
    assert "EOFError" in box.run_sync("input()").error


def test_hash_and_random_seeds_are_fixed(box):
    code = "import random\nprint(random.random(), hash('rivet'))"
    assert len({box.run_sync(code).stdout for _ in range(4)}) == 1


def test_source_may_hold_anything(box):
    assert box.run_sync("print('π≈', '中文', '🎉')").text() == "π≈ 中文 🎉"
    assert box.run_sync("'\ud800'").status == "error"
    assert box.run_sync("").status == "ok"
    assert box.run_sync("\0").status == "error"


def test_oversized_source_is_refused_with_a_reason():
    with PythonSandbox(SandboxLimits(code_bytes=1000), slots=1) as box:
        result = box.run_sync("#" * 2000)
        assert result.status == "error" and "1000" in result.error


def test_large_source_runs(box):
    assert box.run_sync("x = '" + "y" * (1 << 20) + "'\nlen(x)").text() == str(1 << 20)


async def test_async_calls_run_side_by_side():
    """By the clock that the programs themselves read; without overlap one ends before another."""
    timed = "import time\na = time.monotonic()\ntime.sleep(0.5)\nprint(a, time.monotonic())"
    async with PythonSandbox(slots=2) as box:
        one, other = await asyncio.gather(box.run(timed), box.run(timed))
    (start, end), (other_start, other_end) = (map(float, r.stdout.split()) for r in (one, other))
    assert max(start, other_start) < min(end, other_end)


async def test_async_calls_beyond_the_slots_wait_for_their_turn():
    async with PythonSandbox(slots=2) as box:
        results = await asyncio.gather(*(box.run(f"print({i})") for i in range(40)))
        assert [r.text() for r in results] == [str(i) for i in range(40)]


async def test_cancelled_call_frees_its_slot():
    async with PythonSandbox(slots=1) as box:
        task = asyncio.create_task(box.run("import time\ntime.sleep(5)"))
        waiter = asyncio.create_task(box.run("print(1)"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await waiter).text() == "1"


async def test_cancelled_waiter_does_not_lose_the_slot():
    async with PythonSandbox(slots=1) as box:
        tasks = [asyncio.create_task(box.run(f"print({i})")) for i in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r.text() for r in results[::2]] == ["0", "2", "4"]
        assert (await box.run("print(9)")).text() == "9"


@pytest.fixture
def shortage(monkeypatch):
    """Return a function that begins a shortage of descriptors, and one that ends it."""

    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    return lambda: monkeypatch.setattr(socket, "socketpair", fail), monkeypatch.undo


async def test_a_slot_that_could_not_be_replaced_is_started_by_a_later_call(shortage):
    begin, end = shortage
    async with PythonSandbox(slots=1) as box:
        task = asyncio.create_task(box.run("import time\ntime.sleep(5)"))
        waiter = asyncio.create_task(box.run("print(1)"))
        await asyncio.sleep(0)
        begin()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for failed in (await waiter, await box.run("print(2)")):
            assert failed.status == "sandbox_failure" and "Too many open files" in failed.error
        end()
        assert (await box.run("print(3)")).text() == "3"


async def test_a_shortage_leaves_the_calls_to_the_slots_that_are_there(shortage):
    begin, end = shortage
    async with PythonSandbox(slots=2) as box:
        task = asyncio.create_task(box.run("import time\ntime.sleep(5)"))
        await asyncio.sleep(0)
        begin()
        task.cancel()
        results = await asyncio.gather(*(box.run(f"print({i})") for i in range(4)))
        assert [r.text() for r in results] == ["0", "1", "2", "3"] and len(box._all) == 1
        end()
        assert (await box.run("print(4)")).text() == "4" and len(box._all) == 2


def test_a_zygote_that_could_not_be_started_is_started_by_a_later_call(shortage):
    begin, end = shortage
    with PythonSandbox(slots=2) as box:
        box._zygote.kill()
        begin()
        assert [box.run_sync("1").status for _ in range(3)] == ["sandbox_failure"] * 3
        end()
        assert box.run_sync("1").text() == "1" and len(box._all) == 2


def test_a_shortage_at_the_start_is_told_and_leaves_nothing_open(shortage):
    begin, end = shortage
    box = PythonSandbox(slots=1)
    begin()
    with pytest.raises(SandboxError, match=r"did not start: .*Too many open files"):
        box.start()
    end()
    with box:
        assert box.run_sync("1").text() == "1"


def test_threads_share_one_sandbox(box):
    answers: dict[int, str] = {}

    def work(i: int) -> None:
        answers[i] = box.run_sync(f"print({i} * 2)").text()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: str(2 * i) for i in range(20)}


def test_closed_sandbox_says_so():
    box = PythonSandbox(slots=1)
    with pytest.raises(SandboxError, match="not open"):
        box.run_sync("1")


def test_sandbox_can_be_opened_again():
    box = PythonSandbox(slots=1)
    for _ in range(2):
        with box:
            assert box.run_sync("1").text() == "1"


def test_death_of_the_zygote_is_survived():
    with PythonSandbox(slots=2) as box:
        assert box._zygote is not None
        box._zygote.kill()
        assert [box.run_sync(f"{i}").text() for i in range(4)] == ["0", "1", "2", "3"]


def test_bad_limits_are_named():
    with pytest.raises(ValueError, match="cpu_s is 0"):
        SandboxLimits(cpu_s=0)
    with pytest.raises(ValueError, match="stream_bytes"):
        SandboxLimits(stream_bytes=10, output_kill_bytes=5)
    with pytest.raises(ValueError, match="slots"):
        PythonSandbox(slots=0)


def test_text_is_trimmed_in_the_middle():
    text = ExecutionResult("ok", stdout="a" * 500 + "END").text(max_chars=200)
    assert len(text) <= 200 and text.startswith("aaa") and text.endswith("END")


async def test_death_of_the_zygote_fails_no_waiting_call():
    async with PythonSandbox(slots=2) as box:
        tasks = [asyncio.create_task(box.run(f"print({i})")) for i in range(8)]
        await asyncio.sleep(0)
        assert box._zygote is not None
        box._zygote.kill()
        results = await asyncio.gather(*tasks)
        assert [r.text() for r in results] == [str(i) for i in range(8)]
