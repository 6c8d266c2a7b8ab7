"""The baseline that learns from experts without deciding anything: their solutions, ready to train.

Every expert is asked every problem outright; its reply is laid out as the controller's own turn,
its programs are run, and what the last one prints is the answer. `rivet stage2` on the verified
ones is ordinary rejection-sampled distillation: no request, no choice of an expert, no reply to
integrate. What Stage I and Stage II add is to be measured against this.

    OUTPUT_DIR/trajectories/    the store, one row per problem and sample, graded

Run line: `rivet solutions stages/recipes/solutions_mini.yaml --model runs/mini/warm/checkpoint`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from data.miniworld.tasks import FAMILIES, request_for
from data.problems import Problem
from eval.generate import sample
from rivet.checkpoints import find_checkpoint, load_tokenizer
from rivet.config import parse_config, setting
from rivet.experts.ledger import stop_at_budget
from rivet.experts.types import Experts, sample_key
from rivet.grading import Grader
from rivet.grading.extract import last_box
from rivet.prompts import PromptBuilder
from rivet.protocol import parse, split_reply
from rivet.rollout.backend import SamplingParams
from rivet.rollout.splice import Splice, Splicer
from rivet.rollout.types import RolloutRequest
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import CodeRun, ExpertCall, Trajectory
from sandbox import PythonSandbox
from stages.collect import STORE, summary
from stages.experts import open_experts
from stages.training_problems import TrainingProblems

logger = logging.getLogger(__name__)


@dataclass
class SolutionsConfig(TrainingProblems):
    """Settings of `rivet solutions`."""

    model: str = setting("", "Checkpoint whose tokenizer and protocol are used. Required.")
    output_dir: str = setting("runs/solutions", "The run folder.")
    overwrite: bool = setting(False, "Replace a run that is there.")
    problems_seed: int = setting(0, "Seed that the mini-world's problems are drawn with.")
    limit: int | None = setting(None, "Take the first so many problems only, at least 1.")
    experts: str = setting(
        "embedded", "An experts.yaml, or `embedded`: the mini-world's own experts, on loopback."
    )
    samples_per_expert: int = setting(1, "Replies of each expert to each problem, at least 1.")
    seed: int = setting(0, "Seed of the replies.")
    batch_size: int = setting(128, "Questions in flight, at least 1.")
    max_fault_rate: float = setting(
        0.1, "Share of attempts that infrastructure may void before the run stops, in [0, 1]."
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model is not set; expected a checkpoint folder")
        self.check_problems()
        for name in ("samples_per_expert", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; expected at least 1, or null")
        if not 0 <= self.max_fault_rate <= 1:
            raise ValueError(f"max_fault_rate is {self.max_fault_rate}; expected 0 to 1")


class ExpertSolutions:
    """Experts' replies as trajectories; takes the place of the rollout engine.

    Args:
        experts: Who is asked; sample n goes to expert n modulo their number.
        sandbox: Runs their programs.
        tokenizer: Of the controller that will learn the rows.
        settings: The layout and limits that it knows.
        questions: Problem id -> what the experts are asked.
    """

    def __init__(
        self,
        experts: Experts,
        sandbox: PythonSandbox,
        tokenizer: ProtocolTokenizer,
        settings: ProtocolSettings,
        questions: Mapping[str, str],
    ) -> None:
        self._experts = experts
        self._sandbox = sandbox
        self._tokenizer = tokenizer
        self._style = settings.style
        self._limits = settings.limits
        self._splicer = Splicer(tokenizer, settings.style)
        self._questions = questions

    async def rollout(self, request: RolloutRequest) -> Trajectory:
        """One expert's solution of one problem; faults come back as `Trajectory.fault`."""
        names = self._experts.names
        reply = await self._experts.ask(
            names[request.sample_index % len(names)],
            self._questions[request.problem_id],
            sample_key=sample_key(request.seed, request.id, 0),
        )
        call = ExpertCall(
            reply.name,
            reply.status,
            reply.latency_s,
            reply.prompt_tokens,
            reply.completion_tokens,
            reply.cost_usd,
        )
        empty = self._trajectory(request, Splice(), ())
        if reply.status != "ok":
            return replace(empty, fault=f"expert:{reply.status}", finish="fault")
        splice, printed = Splice(), ""
        runs: list[CodeRun] = []
        for kind, piece in split_reply(reply.text):
            if kind == "text":
                # Free text stands in a span of its own, as everything does.
                splice.add("controller", self._tokenizer.encode(self._style.open("think")))
                splice.add("controller", self._splicer.foreign(piece)[0])
                splice.add("controller", self._tokenizer.encode(self._style.close("think")))
                continue
            result = await self._sandbox.run(piece)
            if result.status == "sandbox_failure":
                return replace(empty, fault="sandbox:failure", finish="fault")
            runs.append(CodeRun("controller", result.status, result.duration_s))
            printed = result.text().strip() if result.ok else ""
            splice.add("controller", self._splicer.program(piece))
            splice.extend(self._splicer.output(result.text(), self._limits.max_output_length))
        answer = (printed.splitlines() or [last_box(reply.text).answer or ""])[-1]
        self._add_answer(splice, answer)
        # The call is kept for its cost; the rows hold no consultation.
        row = self._trajectory(request, splice, tuple(runs))
        return replace(row, info=row.info | {"expert": call.name, "cost_usd": call.cost_usd})

    def _add_answer(self, splice: Splice, answer: str) -> None:
        opened = self._tokenizer.encode(self._style.open("answer") + "\\boxed{")
        splice.add("controller", opened)
        splice.add("controller", self._tokenizer.encode_untrusted(answer))
        closed = self._tokenizer.encode("}" + self._style.close("answer").rstrip("\n"))
        splice.add("controller", [*closed, self._tokenizer.eos_id])

    def _trajectory(
        self, request: RolloutRequest, splice: Splice, runs: tuple[CodeRun, ...]
    ) -> Trajectory:
        ids = [token for _, tokens in splice.runs for token in tokens]
        authors = [author for author, tokens in splice.runs for _ in tokens]
        scanner = parse(self._tokenizer, ids, authors)
        reason = scanner.problem()
        return Trajectory(
            id=request.id,
            problem_id=request.problem_id,
            mode=request.mode,
            prompt_ids=tuple(request.prompt_ids),
            segments=scanner.segments(),
            finish="answer",
            well_formed=not reason,
            malformed_reason=reason,
            answer=scanner.answer(),
            code_runs=runs,
            seed=request.seed,
            step=request.step,
            sample_index=request.sample_index,
            info=dict(request.info),
        )


def question_for(problem: Problem) -> str:
    """What an expert is asked: the problem, in the mini-world as its experts read it."""
    is_mini = problem.meta.get("family") in FAMILIES and "entry" in problem.meta
    return request_for(problem) if is_mini else problem.problem


def run(config: SolutionsConfig) -> Path:
    """Collect solutions, or go on with a run that was interrupted.

    Returns:
        The folder of the trajectory store.

    Raises:
        eval.generate.FaultRateError: Infrastructure faults above `max_fault_rate`.
        rivet.interrupt.Interrupted: A signal, or the experts' budget is spent; it can go on.
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
    """
    problems = config.read_problems(config.problems_seed)[: config.limit]
    with RunDir.open(
        config.output_dir, config, stage="solutions", overwrite=config.overwrite
    ) as folder:
        store = TrajectoryStore(folder.path / STORE)
        with stop_at_budget():
            rows = asyncio.run(_collect(config, problems, store, folder.path))
        results = summary(rows)
        logger.info("collected %s", ", ".join(f"{k} {v}" for k, v in results.items()))
        folder.finish(results)
        return store.folder


async def _collect(
    config: SolutionsConfig, problems: Sequence[Problem], store: TrajectoryStore, run_dir: Path
) -> list[Trajectory]:
    checkpoint = find_checkpoint(config.model)
    settings, tokenizer = ProtocolSettings.load(checkpoint), load_tokenizer(checkpoint)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(stack.enter_context(open_experts(config.experts)))
        pool.keep_ledger(run_dir)
        await pool.preflight()
        sandbox = await stack.enter_async_context(PythonSandbox())
        grader = stack.enter_context(Grader())
        questions = {problem.id: question_for(problem) for problem in problems}
        return await sample(
            ExpertSolutions(pool, sandbox, tokenizer, settings, questions),
            grader,
            problems,
            prompts=PromptBuilder(tokenizer, settings),
            mode="local",
            sampling=SamplingParams(),
            store=store,
            samples_per_problem=config.samples_per_expert * len(pool.names),
            seed=config.seed,
            concurrency=config.batch_size,
            max_fault_rate=config.max_fault_rate,
            progress="asking experts",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet solutions RECIPE.yaml [--name value ...]`; prints the store's folder."""
    parsed = parse_config(
        SolutionsConfig,
        argv,
        prog="rivet solutions",
        description="Ask every expert every problem, for a baseline without decisions.",
    )
    print(run(parsed.config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
