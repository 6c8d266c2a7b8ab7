"""The rollout engine over a scripted controller: every way to go on or to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rivet.experts.types import FAULTS, ExpertReply
from rivet.protocol import parse
from rivet.rollout.backend import BackendError, Generation, SamplingParams
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.runner import EngineRunner
from rivet.rollout.stops import StopStrings
from rivet.rollout.types import LATE, PromptTooLongError, RolloutLimits, RolloutRequest
from rivet.settings import ProtocolSettings
from rivet.tokenization import TAG_NAMES, ProtocolTokenizer
from rivet.trajectory import Trajectory
from sandbox import ExecutionResult, PythonSandbox, SandboxError

END = "<|im_end|>"
ASK = '<expert name="calc">6*7?</expert>'
ANSWER = "<answer>\\boxed{42}</answer>" + END


class ScriptedBackend:
    """Writes a given text, token by token, and minds stop strings, limits and banned tokens."""

    def __init__(self, tokenizer: ProtocolTokenizer, text: str | list[int]) -> None:
        self.tokenizer = tokenizer
        self.script = tokenizer.encode(text) if isinstance(text, str) else list(text)
        self.calls: list[dict[str, Any]] = []
        self.released: list[str] = []
        self.written = 0
        self.overshoot = 0  # tokens that come along with the one that completes a stop string

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Generation:
        self.calls.append({"prompt_ids": list(prompt_ids)} | arguments)
        stop = StopStrings(arguments["stop"], self.tokenizer.token_bytes)
        ids: list[int] = []
        reason = "length"
        while len(ids) < arguments["max_new_tokens"]:
            assert self.written < len(self.script), "the script is at its end"
            ids.append(self.script[self.written])
            self.written += 1
            if ids[-1] in self.tokenizer.eos_ids:
                reason = "eos"
                break
            if stop.completed_by_last(ids):
                more = self.script[self.written : self.written + self.overshoot]
                ids, self.overshoot = ids + more, 0
                self.written += len(more)
                reason = "stop"
                break
        return Generation(ids, [-0.5] * len(ids), reason)  # type: ignore[arg-type]

    async def release(self, session: str) -> None:
        self.released.append(session)


class FakeExperts:
    """Experts whose replies a test chooses."""

    names = ("calc", "sage")

    def __init__(self, reply: str | Callable[[str, str], ExpertReply]) -> None:
        self.reply = reply
        self.asked: list[tuple[str, str, str]] = []

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        self.asked.append((name, request, sample_key))
        if isinstance(self.reply, str):
            return ExpertReply(name, "ok", self.reply, latency_s=0.25, completion_tokens=7)
        return self.reply(name, request)


class FakeSandbox:
    """A sandbox that prints what a test chooses."""

    def __init__(self, output: str = "42", status: str = "ok") -> None:
        self.output, self.status = output, status
        self.programs: list[str] = []

    async def run(self, code: str) -> ExecutionResult:
        self.programs.append(code)
        return ExecutionResult(self.status, stdout=self.output, duration_s=0.5)  # type: ignore[arg-type]


def build_engine(
    tokenizer: ProtocolTokenizer,
    text: str | list[int],
    *,
    reply: str | Callable[[str, str], ExpertReply] = "It is 42.",
    sandbox: Any = None,
    after_tag: str = "",
    **limits: int,
) -> RolloutEngine:
    return RolloutEngine(
        ScriptedBackend(tokenizer, text),
        tokenizer,
        ProtocolSettings(after_tag=after_tag),
        experts=FakeExperts(reply),
        sandbox=sandbox or FakeSandbox(),
        limits=RolloutLimits(**limits),
    )


REQUEST = RolloutRequest(
    "p1",
    (1, 2, 3),
    seed=11,
    step=4,
    sample_index=5,
    sampling=SamplingParams(temperature=0.8),
    info={"family": "gcd"},
)


def text_of(engine: RolloutEngine, trajectory: Trajectory) -> str:
    return engine.tokenizer.decode(trajectory.completion_ids)


def assert_sound(engine: RolloutEngine, trajectory: Trajectory) -> None:
    """Parsing the finished ids gives the same segments, and only sampled tokens have logprobs."""
    scanner = parse(engine.tokenizer, trajectory.completion_ids, trajectory.authors)
    assert [(s.author, s.kind, s.ids) for s in scanner.segments()] == [
        (s.author, s.kind, s.ids) for s in trajectory.segments
    ]
    for author, logprob in zip(trajectory.authors, trajectory.logprobs, strict=True):
        assert (logprob is not None) == (author == "controller")


async def test_a_request_is_intercepted_and_the_reply_spliced(tokenizer) -> None:
    engine = build_engine(tokenizer, ASK + ANSWER)
    got = await engine.rollout(REQUEST)
    assert text_of(engine, got) == ASK + '<reply name="calc">It is 42.</reply>' + ANSWER
    assert (got.finish, got.well_formed, got.answer) == ("answer", True, "\\boxed{42}")
    assert engine.experts.asked == [("calc", "6*7?", "b/p1#5@4/0")]
    assert_sound(engine, got)
    assert got.fault is None and got.outcome is None and got.reward is None
    assert (got.seed, got.step, got.sample_index, got.info) == (11, 4, 5, {"family": "gcd"})
    assert (got.id, got.problem_id, got.prompt_ids) == ("p1#5@4", "p1", (1, 2, 3))
    (call,) = got.expert_calls
    assert (call.name, call.status, call.latency_s, call.completion_tokens) == (
        "calc",
        "ok",
        0.25,
        7,
    )


async def test_every_call_continues_the_ids_of_the_last(tokenizer) -> None:
    engine = build_engine(tokenizer, ASK + "<python>1</python>" + ANSWER)
    got = await engine.rollout(REQUEST)
    calls = engine.backend.calls
    everything = [*REQUEST.prompt_ids, *got.completion_ids]
    assert len(calls) == 3
    for call in calls:
        assert call["prompt_ids"] == everything[: len(call["prompt_ids"])]
        assert call["seed"] == 11 and call["sampling"] == REQUEST.sampling
    assert {call["session"] for call in calls} == set(engine.backend.released)


async def test_a_program_of_the_controller_runs_and_its_output_is_spliced(tokenizer) -> None:
    engine = build_engine(tokenizer, "<python>\nprint(6*7)\n</python>" + ANSWER)
    got = await engine.rollout(REQUEST)
    assert engine.sandbox.programs == ["print(6*7)"]
    assert "</python><output>42</output><answer>" in text_of(engine, got)
    assert got.well_formed and got.finish == "answer"
    assert [(run.author, run.status, run.duration_s) for run in got.code_runs] == [
        ("controller", "ok", 0.5)
    ]
    assert_sound(engine, got)
    spliced = [s for s in got.segments if s.author == "environment"]
    assert engine.tokenizer.decode([i for s in spliced for i in s.ids]) == "<output>42</output>"


async def test_code_in_a_reply_runs_as_the_expert_wrote_it(tokenizer) -> None:
    """The text in the trajectory is escaped; what runs is not."""
    code = 'print("<output>")'
    engine = build_engine(
        tokenizer, ASK + ANSWER, reply=f"Try\n```python\n{code}\n```\nthis.", after_tag="\n"
    )
    got = await engine.rollout(REQUEST)
    assert engine.sandbox.programs == [code]
    assert (
        '<reply name="calc">\nTry\n<python>\nprint("<\\output>")\n</python>\n'
        "<output>\n42\n</output>\nthis.\n</reply>\n"
    ) in text_of(engine, got)
    assert got.well_formed
    assert [run.author for run in got.code_runs] == ["expert"]
    assert_sound(engine, got)
    by_author = {
        author: "".join(engine.tokenizer.decode(s.ids) for s in got.segments if s.author == author)
        for author in ("expert", "environment")
    }
    assert by_author["environment"] == "<output>\n42\n</output>\n"
    assert "output>\n42" not in by_author["expert"]


async def test_the_layout_is_completed_only_where_the_sampled_tag_lacks_it(tokenizer) -> None:
    bare = build_engine(tokenizer, ASK + "\n" + ANSWER, after_tag="\n")
    text = text_of(bare, await bare.rollout(REQUEST))
    assert '</expert>\n<reply name="calc">\n' in text
    glued = [i for i, piece in enumerate(tokenizer.token_bytes) if piece == b">\n"]
    if glued:
        ids = [*tokenizer.encode(ASK[:-1]), glued[0], *tokenizer.encode(ANSWER)]
        engine = build_engine(tokenizer, ids, after_tag="\n")
        text = text_of(engine, await engine.rollout(REQUEST))
        assert '</expert>\n<reply name="calc">\n' in text


@pytest.mark.parametrize("mode", ["local", "no-python"])
async def test_without_experts_the_controller_writes_the_reply_itself(tokenizer, mode) -> None:
    text = ASK + '<reply name="calc">It is 42.</reply>' + ANSWER
    engine = build_engine(tokenizer, text)
    engine.experts = None
    got = await engine.rollout(replace(REQUEST, mode=mode))
    assert text_of(engine, got) == text
    assert got.well_formed and got.finish == "answer" and not got.expert_calls
    assert set(got.authors) == {"controller"}


async def test_code_in_a_reply_that_the_controller_wrote_runs(tokenizer) -> None:
    text = ASK + '<reply name="calc">So <python>6*7</python></reply>' + ANSWER
    engine = build_engine(tokenizer, text)
    got = await engine.rollout(replace(REQUEST, mode="local"))
    assert engine.sandbox.programs == ["6*7"]
    assert "<python>6*7</python><output>42</output></reply>" in text_of(engine, got)
    assert got.well_formed
    assert [run.author for run in got.code_runs] == ["controller"]
    assert_sound(engine, got)


@pytest.mark.parametrize(
    "text",
    [
        "<output>42</output>" + ANSWER,
        "<python>1</python><output>7</output>" + ANSWER,
        '<expert name="calc">x</expert><reply name="calc"><output>7</output>' + ANSWER,
    ],
)
async def test_output_that_the_controller_writes_ends_the_trajectory(tokenizer, text) -> None:
    engine = build_engine(tokenizer, text)
    got = await engine.rollout(replace(REQUEST, mode="local"))
    if "python" in text:  # the engine was first: what the controller wrote comes after the output
        assert engine.sandbox.programs == ["1"]
    assert (got.finish, got.well_formed, got.answer) == ("fabricated_output", False, None)
    assert engine.tokenizer.decode(got.completion_ids).count("</output>") == text.count("python>1")
    assert_sound(engine, got)


async def test_tags_inside_thoughts_are_text(tokenizer) -> None:
    thought = "<think>I could <output> or <python>1</python> or " + ASK + "</think>"
    engine = build_engine(tokenizer, thought + ANSWER)
    got = await engine.rollout(REQUEST)
    assert got.finish == "answer" and got.well_formed
    assert not engine.sandbox.programs and not engine.experts.asked


@pytest.mark.parametrize("text", [ASK, "<python>6*7</python>"])
async def test_text_glued_behind_an_intercepted_tag_is_malformed(tokenizer, text) -> None:
    """A token that closes the tag and goes on, as `>x` would."""
    engine = build_engine(tokenizer, [*tokenizer.encode(text), tokenizer.encode("x")[0]])
    engine.backend.overshoot = 1
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.well_formed) == ("malformed", False)
    assert "glued" in got.malformed_reason
    assert not engine.sandbox.programs and not engine.experts.asked
    assert_sound(engine, got)


@pytest.mark.parametrize("space", [" ", "\n"])
async def test_white_space_behind_an_intercepted_tag_is_not(tokenizer, space) -> None:
    engine = build_engine(tokenizer, ASK + space + ANSWER)
    engine.backend.overshoot = 1
    got = await engine.rollout(REQUEST)
    assert got.finish == "answer" and got.well_formed


@pytest.mark.parametrize("status", sorted(FAULTS))
async def test_an_expert_fault_voids_the_trajectory(tag_tokenizer, status) -> None:
    engine = build_engine(
        tag_tokenizer, ASK + ANSWER, reply=lambda name, _: ExpertReply(name, status)
    )
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.fault, got.answer) == ("fault", f"expert:{status}", None)
    assert [call.status for call in got.expert_calls] == [status]
    assert text_of(engine, got) == ASK and engine.backend.released


async def test_an_unknown_expert_is_the_controllers_mistake(tag_tokenizer) -> None:
    engine = build_engine(
        tag_tokenizer, ASK, reply=lambda name, _: ExpertReply(name, "unknown_expert")
    )
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.fault) == ("malformed", None)
    assert "calc" in got.malformed_reason


async def test_an_empty_request_is_never_sent(tag_tokenizer) -> None:
    engine = build_engine(tag_tokenizer, '<expert name="calc"> \n</expert>')
    got = await engine.rollout(REQUEST)
    assert got.finish == "malformed" and not engine.experts.asked


async def test_budgets_end_the_trajectory(tag_tokenizer) -> None:
    refused = build_engine(tag_tokenizer, ASK, reply=lambda name, _: ExpertReply(name, "budget"))
    assert (await refused.rollout(REQUEST)).finish == "budget"
    calls = build_engine(tag_tokenizer, ASK * 3, max_expert_calls=2)
    got = await calls.rollout(REQUEST)
    assert got.finish == "budget" and len(got.expert_calls) == len(calls.experts.asked) == 2
    runs = build_engine(tag_tokenizer, "<python>1</python>" * 3, max_code_runs=2)
    got = await runs.rollout(REQUEST)
    assert got.finish == "budget" and len(got.code_runs) == len(runs.sandbox.programs) == 2
    assert got.fault is None


async def test_a_sandbox_failure_voids_the_trajectory(tag_tokenizer) -> None:
    class Broken:
        async def run(self, code: str) -> ExecutionResult:
            raise SandboxError("no slot")

    for sandbox in (Broken(), FakeSandbox(status="sandbox_failure")):
        for text in ("<python>1</python>", ASK):
            engine = build_engine(tag_tokenizer, text, reply="```python\n1\n```", sandbox=sandbox)
            got = await engine.rollout(REQUEST)
            assert (got.finish, got.fault) == ("fault", "sandbox:failure")


@pytest.mark.parametrize("status", ["error", "timeout", "crash", "output_limit"])
async def test_a_program_that_fails_is_no_fault(tag_tokenizer, status) -> None:
    engine = build_engine(
        tag_tokenizer, "<python>1</python>" + ANSWER, sandbox=FakeSandbox("no", status)
    )
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.fault) == ("answer", None)
    assert [run.status for run in got.code_runs] == [status]


async def test_a_backend_error_voids_the_trajectory(tag_tokenizer) -> None:
    engine = build_engine(tag_tokenizer, ASK)

    async def fail(*args: Any, **kwargs: Any) -> Generation:
        raise BackendError("no memory")

    engine.backend.generate = fail
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.fault, got.segments) == ("fault", "backend:error", ())


async def test_the_length_limit_counts_spliced_tokens(tokenizer) -> None:
    whole = build_engine(tokenizer, ASK + ANSWER)
    complete = (await whole.rollout(REQUEST)).completion_ids
    n = len(complete)
    for limit in range(1, n + 1):
        engine = build_engine(tokenizer, ASK + ANSWER, max_completion_length=limit)
        got = await engine.rollout(REQUEST)
        assert got.finish == ("answer" if limit == n else "length"), limit
        assert len(got.completion_ids) <= limit
        assert got.completion_ids == complete[: len(got.completion_ids)]
        assert_sound(engine, got)


async def test_no_expert_is_paid_when_no_reply_can_fit(tokenizer) -> None:
    engine = build_engine(
        tokenizer, ASK + ANSWER, max_completion_length=len(tokenizer.encode(ASK)) + 2
    )
    got = await engine.rollout(REQUEST)
    assert got.finish == "length" and not engine.experts.asked


async def test_a_shorter_context_of_the_backend_is_length_and_no_fault(tag_tokenizer) -> None:
    engine = build_engine(tag_tokenizer, "<think>" + "ab " * 30)
    engine.backend.max_context = 13
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.fault, len(got.completion_ids)) == ("length", None, 10)


async def test_a_prompt_that_fills_the_context_is_the_problems_fault(tag_tokenizer) -> None:
    engine = build_engine(tag_tokenizer, ANSWER)
    engine.backend.max_context = len(REQUEST.prompt_ids)
    with pytest.raises(PromptTooLongError, match=r"p1 \(3 tokens\); expected fewer than 3 tokens"):
        await engine.rollout(REQUEST)
    assert not engine.backend.calls


async def test_at_its_deadline_a_trajectory_is_late_and_the_others_are_not(tag_tokenizer) -> None:
    scripts = {n: f'<expert name="calc">{n}</expert>{ANSWER}' for n in ("slow", "quick")}
    meeting = Meeting()
    backend = ByProblem(tag_tokenizer, scripts)
    engine = RolloutEngine(
        backend,
        tag_tokenizer,
        ProtocolSettings(after_tag=""),
        experts=meeting,
        sandbox=FakeSandbox(),
    )
    meeting.open["quick"] = asyncio.Event()
    meeting.open["quick"].set()
    slow, quick = await engine.rollouts(
        [
            replace(REQUEST, problem_id="slow", deadline_s=0.05),
            replace(REQUEST, problem_id="quick", deadline_s=600.0),
        ]
    )
    assert (slow.finish, slow.fault, slow.answer) == ("fault", LATE, None)
    assert text_of(engine, slow) == '<expert name="calc">slow</expert>'  # what it has is kept
    assert (quick.finish, quick.fault) == ("answer", None)


async def test_a_timeout_that_is_not_the_deadlines_is_no_late_trajectory(tag_tokenizer) -> None:
    engine = build_engine(tag_tokenizer, ASK)

    async def fail(*args: Any, **kwargs: Any) -> Generation:
        raise TimeoutError("from elsewhere")

    engine.backend.generate = fail
    with pytest.raises(TimeoutError, match="elsewhere"):
        await engine.rollout(replace(REQUEST, deadline_s=600.0))


async def test_long_replies_and_outputs_are_cut_visibly_and_closed(tokenizer) -> None:
    engine = build_engine(
        tokenizer,
        ASK + "<python>1</python>" + ANSWER,
        reply="word " * 100,
        sandbox=FakeSandbox("9 " * 100),
        max_reply_length=20,
        max_output_length=10,
    )
    got = await engine.rollout(REQUEST)
    text = text_of(engine, got)
    assert text.count("... [cut]</") == 2
    assert got.well_formed
    for name, author, limit in (("reply", "expert", 20), ("output", "environment", 10)):
        tokens = [i for s in got.segments if (s.author, s.kind) == (author, name) for i in s.ids]
        assert limit < len(tokens) <= limit + len(tokenizer.encode(" ... [cut]")) + 1
    assert_sound(engine, got)


async def test_a_program_that_does_not_fit_its_reply_is_left_out_and_not_run(tokenizer) -> None:
    reply = "Text.\n```python\n" + "x = 1\n" * 50 + "```\nMore."
    engine = build_engine(tokenizer, ASK + ANSWER, reply=reply, max_reply_length=40)
    got = await engine.rollout(REQUEST)
    assert not engine.sandbox.programs and "<python>" not in text_of(engine, got)
    assert '<reply name="calc">Text. ... [cut]</reply>' in text_of(engine, got)
    assert got.well_formed


async def test_a_reply_with_one_program_too_many_ends_before_it_and_the_controller_goes_on(
    tokenizer,
) -> None:
    reply = "One:\n```\nprint(1)\n```\nTwo:\n```\nprint(2)\n```\nMore."
    engine = build_engine(tokenizer, ASK + ANSWER, reply=reply, max_code_runs=1)
    got = await engine.rollout(REQUEST)
    assert engine.sandbox.programs == ["print(1)"]  # type: ignore[union-attr]
    assert "<output>42</output>Two: ... [cut]</reply><answer>" in text_of(engine, got)
    assert (got.finish, got.well_formed, got.answer) == ("answer", True, "\\boxed{42}")
    assert_sound(engine, got)


async def test_no_expert_mode_bans_the_tag_or_ends_as_malformed(tokenizer) -> None:
    engine = build_engine(tokenizer, ASK + ANSWER)
    got = await engine.rollout(replace(REQUEST, mode="no-expert"))
    assert (got.finish, got.fault) == ("malformed", None)
    assert "no-expert" in got.malformed_reason and not engine.experts.asked
    banned = engine.backend.calls[0]["banned_ids"]
    for i, piece in enumerate(tokenizer.token_bytes):
        assert (i in banned) == piece.startswith(b"<expert")
    fine = build_engine(tokenizer, "<think>an <expert or two</think>" + ANSWER)
    got = await fine.rollout(replace(REQUEST, mode="no-expert"))
    assert got.finish == "answer" and got.well_formed


async def test_no_python_mode_never_runs_a_program(tokenizer) -> None:
    engine = build_engine(tokenizer, "<python>1</python>" + ANSWER)
    engine.sandbox = None
    got = await engine.rollout(replace(REQUEST, mode="no-python"))
    assert (got.finish, got.fault) == ("malformed", None)
    assert "no-python" in got.malformed_reason
    banned = engine.backend.calls[0]["banned_ids"]
    for i, piece in enumerate(tokenizer.token_bytes):
        assert (i in banned) == piece.startswith(b"<python>")


async def test_plain_mode_has_no_tags_and_the_whole_text_is_the_answer(tokenizer) -> None:
    text = "So <python>1</python> gives \\boxed{42}"
    engine = build_engine(tokenizer, text + END)
    engine.sandbox = engine.experts = None
    got = await engine.rollout(replace(REQUEST, mode="plain"))
    assert (got.finish, got.answer, got.well_formed) == ("answer", text, True)
    assert engine.backend.calls[0]["stop"] == ()
    cut = build_engine(tokenizer, text + END, max_completion_length=4)
    got = await cut.rollout(replace(REQUEST, mode="plain"))
    assert (got.finish, got.well_formed, got.malformed_reason) == (
        "length",
        False,
        "no end of turn",
    )


async def test_an_end_without_an_answer_is_eos(tokenizer) -> None:
    engine = build_engine(tokenizer, "<think>no idea</think>" + END)
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.answer, got.well_formed) == ("eos", None, False)
    assert got.malformed_reason == "no <answer> at the end"


async def test_what_a_mode_needs_is_checked_first(tag_tokenizer) -> None:
    engine = RolloutEngine(ScriptedBackend(tag_tokenizer, ""), tag_tokenizer, ProtocolSettings())
    with pytest.raises(ValueError, match="experts"):
        await engine.rollout(REQUEST)
    with pytest.raises(ValueError, match="sandbox"):
        await engine.rollout(replace(REQUEST, mode="local"))


class Meeting:
    """Experts that answer when a test says so: `open[request].set()`."""

    names = ("calc",)

    def __init__(self) -> None:
        self.arrived: dict[str, asyncio.Event] = {}
        self.open: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        self.arrived.setdefault(request, asyncio.Event()).set()
        await self.open.setdefault(request, asyncio.Event()).wait()
        return ExpertReply(name, "ok", "done")


class ByProblem:
    """A backend that plays one script a session."""

    def __init__(self, tokenizer: ProtocolTokenizer, scripts: dict[str, str]) -> None:
        self.backends = {name: ScriptedBackend(tokenizer, text) for name, text in scripts.items()}

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Generation:
        problem = arguments["session"].split("#")[0]
        return await self.backends[problem].generate(prompt_ids, **arguments)

    async def release(self, session: str) -> None:
        pass


async def test_nobody_waits_for_the_slowest_and_order_is_kept(tag_tokenizer) -> None:
    scripts = {
        n: f'<expert name="calc">{n} first</expert><expert name="calc">{n}</expert>{ANSWER}'
        for n in ("slow", "quick", "last")
    }
    meeting = Meeting()
    engine = RolloutEngine(
        ByProblem(tag_tokenizer, scripts),
        tag_tokenizer,
        ProtocolSettings(after_tag=""),
        experts=meeting,
        sandbox=FakeSandbox(),
    )
    done: list[str] = []
    task = asyncio.create_task(
        engine.rollouts(
            [replace(REQUEST, problem_id=n) for n in scripts],
            on_done=lambda t: done.append(t.problem_id),
        )
    )
    for n in ("quick", "last"):  # they get through while `slow` waits for its first reply
        for request in (f"{n} first", n):
            await meeting.arrived.setdefault(request, asyncio.Event()).wait()
            meeting.open.setdefault(request, asyncio.Event()).set()
        while n not in done:
            await asyncio.sleep(0)
    assert done == ["quick", "last"] and not task.done()
    for request in ("slow first", "slow"):
        meeting.open.setdefault(request, asyncio.Event()).set()
    got = await task
    assert [t.problem_id for t in got] == ["slow", "quick", "last"]
    assert all(t.finish == "answer" for t in got)


@pytest.mark.parametrize("mode", ["experts", "plain"])
async def test_a_token_that_the_tokenizer_does_not_have_ends_its_own_trajectory_alone(
    tag_tokenizer, mode
) -> None:
    class Padded(ByProblem):
        """One session gets a token of the padding behind its first call's tokens."""

        async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Generation:
            got = await super().generate(prompt_ids, **arguments)
            if arguments["session"].startswith("padded"):
                return replace(got, finish_reason="unknown_token")
            return got

    engine = build_engine(tag_tokenizer, "")
    engine.backend = Padded(tag_tokenizer, {"padded": ASK, "sound": ANSWER})  # type: ignore
    requests = [
        replace(REQUEST, problem_id=n, mode=mode, max_completion_length=len(ASK))
        for n in ("padded", "sound")
    ]
    engine.backend.backends["padded"].script += [1] * len(ASK)  # type: ignore
    padded, sound = await engine.rollouts(requests)
    assert (padded.finish, padded.fault, padded.well_formed) == ("malformed", None, False)
    assert not engine.experts.asked and padded.completion_ids  # type: ignore
    assert sound.finish == "answer"


async def test_in_flight_is_bounded(tag_tokenizer) -> None:
    meeting = Meeting()
    scripts = {str(n): f'<expert name="calc">{n}</expert>{ANSWER}' for n in range(4)}
    engine = RolloutEngine(
        ByProblem(tag_tokenizer, scripts),
        tag_tokenizer,
        ProtocolSettings(after_tag=""),
        experts=meeting,
        sandbox=FakeSandbox(),
    )
    requests = [replace(REQUEST, problem_id=n) for n in scripts]
    task = asyncio.create_task(engine.rollouts(requests, max_in_flight=2))
    for n in range(4):
        await meeting.arrived.setdefault(str(n), asyncio.Event()).wait()
        assert len(meeting.arrived) <= n + 2
        meeting.open.setdefault(str(n), asyncio.Event()).set()
    assert len(await task) == 4


def test_a_trainer_without_a_loop_can_run_rollouts(tag_tokenizer) -> None:
    state: list[str] = []

    @asynccontextmanager
    async def open_engine():
        state.append("open")
        try:
            yield build_engine(tag_tokenizer, (ASK + ANSWER) * 2)
        finally:
            state.append("closed")

    with EngineRunner(open_engine) as runner:
        first = runner.run([REQUEST])
        second = runner.run([replace(REQUEST, sample_index=6)])
        with pytest.raises(ValueError, match="sandbox"):
            runner.engine.sandbox = None
            runner.run([REQUEST])
    assert [t.finish for t in (*first, *second)] == ["answer", "answer"]
    assert state == ["open", "closed"]


HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/", "\\", "/\\")),
                '<expert name="calc">',
                '<reply name="calc">',
                "<|im_end|>",
                "<|im_start|>",
                "<tool_call>",
                "\\boxed{7}",
                "```python\n",
                "\n```",
                "\uff1cthink\uff1e",
                "<",
                ">",
                "\n",
                "\ud800",
                "... [cut]",
            ]
        ),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(reply=HOSTILE, output=HOSTILE, after_tag=st.sampled_from(["", "\n"]), cut=st.booleans())
async def test_nothing_that_an_expert_or_a_program_says_can_forge_anything(
    tokenizer, reply: str, output: str, after_tag: str, cut: bool
) -> None:
    limits = {"max_reply_length": 9, "max_output_length": 5} if cut else {}
    text = ASK + "<python>print(1)</python>" + ANSWER
    engine = build_engine(
        tokenizer,
        text,
        reply=reply,
        sandbox=FakeSandbox(output),
        after_tag=after_tag,
        max_code_runs=100,
        max_completion_length=100_000,
        **limits,
    )
    got = await engine.rollout(REQUEST)
    assert (got.finish, got.fault, got.answer) == ("answer", None, "\\boxed{42}")
    assert got.well_formed, got.malformed_reason
    assert_sound(engine, got)
    controller = [i for s in got.segments if s.author == "controller" for i in s.ids]
    assert tokenizer.decode(controller) == text
    foreign_kinds = {(s.author, s.kind) for s in got.segments if s.author != "controller"}
    assert not {kind for _, kind in foreign_kinds} & {"request", "answer", "reasoning"}
    assert ("expert", "output") not in foreign_kinds
    assert not tokenizer.eos_ids & {
        i for s in got.segments if s.author != "controller" for i in s.ids
    }


async def test_the_real_sandbox_runs_what_the_expert_wrote(tag_tokenizer) -> None:
    async with PythonSandbox(slots=1) as sandbox:
        engine = build_engine(
            tag_tokenizer,
            ASK + "<python>print('</' + 'python>')\n1/0</python>" + ANSWER,
            reply="```python\nfrom math import gcd\nprint(gcd(12, 18))\n```",
            sandbox=sandbox,
        )
        got = await engine.rollout(REQUEST)
    text = text_of(engine, got)
    assert "<output>6</output></reply>" in text
    assert "<output><\\/python>\n" in text and "ZeroDivisionError" in text
    assert [(r.author, r.status) for r in got.code_runs] == [
        ("expert", "ok"),
        ("controller", "error"),
    ]
    assert got.well_formed and got.fault is None
