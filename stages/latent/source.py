"""Sampling and grading for latent collaboration; the `RolloutSource` of Stage I's trainer.

The policy answers in one turn, so a trajectory is its completion alone. Grades of one answer to one
problem are kept: the samples of a group are often the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.problems import Problem
from eval.grade import gold_of
from rivet.grading import Grade, Grader, Request
from rivet.latent.policy import LatentPolicy
from rivet.latent.prompts import LatentPrompts
from rivet.latent.sampling import Sample, sample
from rivet.latent.states import ExpertStates
from rivet.rewards import outcome_reward
from rivet.rollout.types import rollout_seed
from rivet.trajectory import Segment, Trajectory
from stages.latent.listener import Listener
from stages.stage1.fates import is_flat
from stages.stage1.rollouts import Asked

_BOX = "\\boxed{"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled.

    Attributes:
        max_completion_length: Most tokens of a completion.
        temperature: Above 0; 0 is greedy.
        seed: Of the run.
        batch_size: Most samples at the same time.
    """

    max_completion_length: int
    temperature: float = 1.0
    seed: int = 0
    batch_size: int = 1024


class LatentSource:
    """Samples and grades the rollouts of a step.

    Args:
        policy: The trainer's own model (the language model in it, where LoRA wraps it).
        prompts: Builds prompts.
        listener: What the policy hears.
        grader: Grades.
        sampling: How it samples.
    """

    def __init__(
        self,
        policy: LatentPolicy,
        prompts: LatentPrompts,
        listener: Listener,
        grader: Grader,
        sampling: Sampling,
    ) -> None:
        self._policy = policy
        self._prompts = prompts
        self._listener = listener
        self._grader = grader
        self._sampling = sampling
        self._grades: dict[tuple[str, str], Grade] = {}

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        """Trajectories with outcome and reward set, in the order that they were asked for."""
        found: list[Trajectory] = []
        size = self._sampling.batch_size
        for start in range(0, len(asked), size):
            part = asked[start : start + size]
            rows = [self._listener.row(a.problem.id) for a in part]
            distinct = list(dict.fromkeys(rows))
            states = self._listener.hear(distinct, part[0].step)
            found += self._of_batch(part, rows, distinct, states)
        return found

    def sample_until_mixed(
        self, groups: Sequence[Sequence[Sequence[Asked]]]
    ) -> list[list[list[Trajectory]]]:
        """See `RolloutSource`; all groups that are still flat go on together."""
        tried: list[list[list[Trajectory]]] = [[] for _ in groups]
        flat = list(range(len(groups)))
        while flat:
            chosen = [groups[n][len(tried[n])] for n in flat]
            done = iter(self.sample([one for group in chosen for one in group]))
            for n, group in zip(flat, chosen, strict=True):
                tried[n].append([next(done) for _ in group])
            flat = [n for n in flat if is_flat(tried[n][-1]) and len(tried[n]) < len(groups[n])]
        return tried

    def of_problems(
        self, problems: Sequence[Problem], states: ExpertStates | None
    ) -> list[Trajectory]:
        """One greedy trajectory of each problem, for evaluation.

        Args:
            problems: What is asked.
            states: H that goes with each of them; None for a policy that hears nothing.
        """
        found: list[Trajectory] = []
        size = self._sampling.batch_size
        for start in range(0, len(problems), size):
            part = [Asked(problem, 0, 0) for problem in problems[start : start + size]]
            rows = list(range(start, start + len(part)))
            heard = None if states is None else states.rows(rows)
            found += self._of_batch(part, rows, rows, heard, is_greedy=True)
        return found

    def _of_batch(
        self,
        asked: Sequence[Asked],
        rows: Sequence[int],
        distinct: Sequence[int],
        states: ExpertStates | None,
        *,
        is_greedy: bool = False,
    ) -> list[Trajectory]:
        """Sample and grade; `states` goes with the `distinct` rows."""
        place = {row: n for n, row in enumerate(distinct)}
        problem_of = dict(zip(rows, [a.problem for a in asked], strict=True))
        prompts = [self._prompts.build(problem_of[row].problem) for row in distinct]
        seeds = [
            rollout_seed(self._sampling.seed, a.step, a.problem.id, a.sample_index) for a in asked
        ]
        # Training mode would drop activations, and recomputing them leaves no cache.
        was_training = self._policy.training
        self._policy.eval()
        try:
            samples = sample(
                self._policy,
                prompts,
                states,
                rows=[place[row] for row in rows],
                seeds=None if is_greedy else seeds,
                max_new_tokens=self._sampling.max_completion_length,
                eos_ids=self._prompts.tokenizer.eos_ids,
                vocab_size=len(self._prompts.tokenizer.token_bytes),
                temperature=1.0 if is_greedy else self._sampling.temperature,
            )
        finally:
            self._policy.train(was_training)
        trajectories = [
            self._trajectory(a, prompts[place[row]], s, seed)
            for a, row, s, seed in zip(asked, rows, samples, seeds, strict=True)
        ]
        return self._graded([a.problem for a in asked], trajectories)

    def _trajectory(
        self, asked: Asked, prompt: Sequence[int], drawn: Sample, seed: int
    ) -> Trajectory:
        text = self._prompts.tokenizer.decode(drawn.ids)
        return Trajectory(
            id=asked.id,
            problem_id=asked.problem.id,
            mode="plain",
            prompt_ids=tuple(prompt),
            segments=(Segment("controller", "answer", drawn.ids, drawn.logprobs),),
            finish="eos" if drawn.is_finished else "length",
            well_formed=drawn.is_finished and _BOX in text,
            # Without a box there is nothing to grade: void, as in Stage I.
            answer=text if _BOX in text else None,
            seed=seed,
            step=asked.step,
            sample_index=asked.sample_index,
            info={
                "family": asked.problem.meta.get("family", ""),
                "gold": asked.problem.answer,
                "source": asked.problem.source,
            },
        )

    def _graded(
        self, problems: Sequence[Problem], trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        pairs = list(zip(problems, trajectories, strict=True))
        new = {
            (p.id, t.answer): Request(t.answer, gold_of(p), p.kind, p.meta.get("choices"))
            for p, t in pairs
            if t.answer is not None and (p.id, t.answer) not in self._grades
        }
        grades = self._grader.grade_many(new.values()) if new else []
        fresh = dict(zip(new, grades, strict=True))
        # A grader that failed may succeed the next time.
        self._grades |= {key: g for key, g in fresh.items() if not g.is_fault}
        done = []
        for problem, trajectory in pairs:
            key = (problem.id, trajectory.answer or "")
            grade = self._grades.get(key) or fresh.get(key)
            outcome = "no_answer" if grade is None else grade.outcome
            info = trajectory.info | {"extracted": None if grade is None else grade.extracted}
            graded = replace(trajectory, outcome=outcome, info=info)
            done.append(replace(graded, reward=outcome_reward(graded)))
        return done
