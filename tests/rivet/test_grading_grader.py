"""The grader itself: outcomes, kinds, processes, threads and event loops."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from rivet.grading import BadRequest, Grade, Grader, GraderFault, Request, grade
from rivet.grading.pool import WorkerDied, WorkerTimeout


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2) as shared:
        yield shared


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, rivet.grading; "
        "print([m for m in ('torch', 'sympy', 'mpmath', 'reasoning_gym', 'math_verify') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_an_integer_needs_no_worker():
    grader = Grader()
    assert grader.grade_sync(r"so \boxed{42}", "42").outcome == "right"
    assert grader.grade_sync(r"so \boxed{43}", "42").outcome == "wrong"
    assert grader._pool._idle == []


def test_a_grade_says_what_was_extracted_and_where(grader):
    assert grader.grade_sync(r"\boxed{\frac12}", "0.5") == Grade(
        "right", r"\frac12", "same value", "box"
    )
    assert grader.grade_sync("I do not know", "0.5").outcome == "no_answer"


def test_the_module_level_function_grades():
    assert grade(r"\boxed{7}", "7").is_right
    assert grade(r"\boxed{B}", "B", "choice").is_right


def test_async_grading_runs_beside_the_loop():
    """The worker replies only once the loop, going on meanwhile, has let it."""

    async def grade_one(grader: Grader, worker: int) -> tuple[Grade, bool]:
        grading = asyncio.create_task(grader.grade(r"\boxed{2x}", "x+x"))
        for _ in range(20):
            await asyncio.sleep(0.001)
        is_waiting = not grading.done()
        os.kill(worker, signal.SIGCONT)
        return await grading, is_waiting

    with Grader(workers=1) as grader:
        grader.grade_sync(r"\boxed{x}", "x")
        worker = grader._pool._idle[0].process.pid
        os.kill(worker, signal.SIGSTOP)
        grade, is_waiting = asyncio.run(grade_one(grader, worker))
    assert grade.is_right and is_waiting


def test_many_async_gradings_come_back_in_order(grader):
    async def grade_all():
        return await asyncio.gather(
            *(grader.grade(rf"\boxed{{\frac{{{i}}}{{2}}}}", r"\frac{3}{2}") for i in range(8))
        )

    outcomes = [item.outcome for item in asyncio.run(grade_all())]
    assert outcomes == ["right" if i == 3 else "wrong" for i in range(8)]


def test_any_thread_may_grade(grader):
    results: dict[int, str] = {}

    def work(index: int) -> None:
        grade = grader.grade_sync(rf"\boxed{{\sqrt{{{index}}}}}", r"\sqrt{5}")
        results[index] = grade.outcome

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: "right" if index == 5 else "wrong" for index in range(2, 10)}


def test_many_answers_come_back_in_order(grader):
    requests = [Request(rf"\boxed{{{i}x}}", "3x") for i in range(12)]
    outcomes = [item.outcome for item in grader.grade_many(requests)]
    assert outcomes == ["right" if i == 3 else "wrong" for i in range(12)]


def test_a_worker_that_misses_its_deadline_is_killed_and_replaced(monkeypatch):
    with Grader(workers=1) as grader:
        assert grader.grade_sync(r"\boxed{x}", "x").is_right
        worker = grader._pool._idle[0]
        os.kill(worker.process.pid, 19)  # SIGSTOP: the worker is there and says nothing
        grader._pool.timeout_s = 0.2
        late = grader.grade_sync(r"\boxed{x}", "x")
        assert late.outcome == "timeout"
        assert worker.process.returncode is not None
        grader._pool.timeout_s = 30
        assert grader.grade_sync(r"\boxed{x}", "x").is_right


def test_an_interrupted_request_leaves_its_reply_to_nobody():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Grader(workers=1) as grader:
            grader.grade_sync(r"\boxed{x}", "x")
            worker = grader._pool._idle[0].process.pid
            os.kill(worker, signal.SIGSTOP)  # it replies only once it goes on
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                grader.grade_sync(r"\boxed{x}", "x")
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)
            assert grader.grade_sync(r"\boxed{y}", "x").outcome == "wrong"
            assert grader.grade_sync(r"\boxed{x}", "x").outcome == "right"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_answer_that_costs_too_much_is_wrong_and_no_fault():
    with Grader(workers=1, timeout_s=1) as grader:
        grader.grade_sync(r"\boxed{x}", "x")
        worker = grader._pool._idle[0]
        grader._pool.timeout_s = 120  # of wall time; the worker keeps its limit of CPU time
        costly = r"\sum_{k=1}^{500} " + r"\sin(kx)" * 60 + r" + \frac{1}{0}"
        grade = grader.grade_sync(rf"\boxed{{{costly}}}", "x+1")
        assert (grade.outcome, grade.reason) == (
            "wrong",
            "refused: the request costs too much CPU time",
        )
        assert worker.process.returncode == -signal.SIGXCPU
        assert grader.grade_sync(r"\boxed{x}", "x").is_right


def test_a_worker_killed_between_requests_is_replaced():
    with Grader(workers=1) as grader:
        grader.grade_sync(r"\boxed{x}", "x")
        worker = grader._pool._idle[0]
        worker.process.kill()
        worker.process.wait()
        assert grader.grade_sync(r"\boxed{x}", "x").is_right


@pytest.mark.parametrize(
    ("error", "outcome"), [(WorkerTimeout("late"), "timeout"), (WorkerDied("gone"), "died")]
)
def test_a_fault_is_no_verdict(monkeypatch, error, outcome):
    grader = Grader()

    def fail(request, *, warm=""):
        raise error

    monkeypatch.setattr(grader._pool, "ask", fail)
    result = grader.grade_sync(r"\boxed{x}", "x")
    assert result.outcome == outcome
    assert result.is_fault
    with pytest.raises(GraderFault):
        _ = result.is_right


def test_a_worker_has_a_memory_limit_and_no_secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-workers")
    with Grader(workers=1, memory_mb=1024) as grader:
        grader.grade_sync(r"\boxed{x}", "x")
        pid = grader._pool._idle[0].process.pid
        with open(f"/proc/{pid}/limits") as limits:
            line = next(line for line in limits if line.startswith("Max address space"))
        assert str(1024 * 2**20) in line
        with open(f"/proc/{pid}/environ") as environment:
            assert "not-for-workers" not in environment.read()


def test_a_worker_out_of_memory_is_a_fault():
    from rivet.grading import worker

    def explode(request):
        raise MemoryError

    original, worker._answer = worker._answer, explode
    try:
        assert worker.answer_request({"kind": "math"}) == {"fault": "out of memory"}
    finally:
        worker._answer = original


def test_closing_ends_the_workers():
    grader = Grader(workers=1)
    grader.grade_sync(r"\boxed{x}", "x")
    process = grader._pool._idle[0].process
    grader.close()
    assert process.returncode is not None
    assert grader.grade_sync(r"\boxed{x}", "x").is_right
    grader.close()


def test_a_fork_does_not_share_workers():
    code = (
        "import os\n"
        "from rivet.grading import Grader\n"
        "g = Grader(workers=1)\n"
        "assert g.grade_sync(r'\\boxed{x}', 'x').is_right\n"
        "pid = os.fork()\n"
        "ok = g.grade_sync(r'\\boxed{y}', 'y').is_right\n"
        "g.close()\n"
        "if pid == 0:\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0 and ok\n"
        "g.grade_sync(r'\\boxed{x}', 'x')\n"
        "if os.fork() == 0:\n"
        "    raise SystemExit\n"
        "os.wait()\n"
        "assert g._pool._idle[0].is_alive\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


ENTRIES = {
    "chain_sum": ("579", {}),
    "products": ("56088", {}),
    "gcd": ("6", {}),
    "lcm": ("84", {}),
    "simple_equations": ("13", {}),
    "fraction_simplification": (
        "3/4",
        {
            "numerator": 6,
            "denominator": 8,
            "simplified_numerator": 3,
            "simplified_denominator": 4,
        },
    ),
}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_mini_world_tasks_are_graded_by_their_own_scorer(grader, name):
    answer, metadata = ENTRIES[name]
    gold = {"answer": answer, "metadata": {"source_dataset": name, **metadata}}
    right = grader.grade_sync(rf"\boxed{{{answer}}}", gold, kind="reasoning_gym")
    assert right.outcome == "right", right
    beside = grader.grade_sync(rf"\boxed{{{answer}}}", answer, kind="reasoning_gym", entry=gold)
    assert beside == right
    as_json = grader.grade_sync(rf"\boxed{{{answer}}}", json.dumps(gold), kind="reasoning_gym")
    assert as_json.outcome == "right"
    for other in (answer + "1", "0", "-" + answer, "__import__('os')"):
        wrong = grader.grade_sync(rf"\boxed{{{other}}}", gold, kind="reasoning_gym")
        assert wrong.outcome == "wrong", wrong


def test_a_whole_simplified_fraction_keeps_its_denominator(grader):
    metadata = {
        "source_dataset": "fraction_simplification",
        "numerator": 8,
        "denominator": 8,
        "simplified_numerator": 1,
        "simplified_denominator": 1,
    }
    gold = {"answer": "1/1", "metadata": metadata}
    assert grader.grade_sync(r"\boxed{1/1}", gold, kind="reasoning_gym").outcome == "right"
    assert grader.grade_sync(r"\boxed{1}", gold, kind="reasoning_gym").outcome == "wrong"


def test_a_scorer_that_nobody_reviewed_is_refused(grader):
    gold = {"answer": "1", "metadata": {"source_dataset": "countdown"}}
    with pytest.raises(BadRequest, match="not reviewed"):
        grader.grade_sync(r"\boxed{1}", gold, kind="reasoning_gym")
    with pytest.raises(BadRequest, match="unknown"):
        gold = {"answer": "1", "metadata": {"source_dataset": "no_such_set"}}
        grader.grade_sync(r"\boxed{1}", gold, kind="reasoning_gym")


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("42", "maths"),
        ("not json", "reasoning_gym"),
        ('{"answer": "1"}', "reasoning_gym"),
        ({"answer": "1"}, "math"),
        ("42", "choice"),
        ("  ", "exact"),
    ],
)
def test_an_unusable_request_raises(grader, gold, kind):
    with pytest.raises(BadRequest):
        grader.grade_sync(r"\boxed{1}", gold, kind=kind)


def test_unusable_settings_raise():
    for settings in ({"workers": 0}, {"timeout_s": 0}, {"memory_mb": 10}, {"mode": "strict"}):
        with pytest.raises(BadRequest):
            Grader(**settings)
    with pytest.raises(BadRequest, match="mode"):
        grade(r"\boxed{1}", "1", mode="strict")


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("12", "12", "right"),
        ("12", "12.0", "right"),
        ("12", "+12", "right"),
        ("12", "012", "right"),
        ("12", "12.5", "wrong"),
        ("3/4", "3/4", "right"),
        ("3/4", "6/8", "wrong"),
        ("red  door", "red door", "right"),
        ("red", "Red", "wrong"),
        ("1", "1e0", "wrong"),
    ],
)
def test_exact_compares_text_and_numerals(grader, gold, answer, outcome):
    assert grader.grade_sync(rf"\boxed{{{answer}}}", gold, kind="exact").outcome == outcome
