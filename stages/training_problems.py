"""Which problems are trained on; shared by Stage I, collection and the experts' solutions."""

from __future__ import annotations

from dataclasses import dataclass

from data.miniworld.tasks import build_split, check_families
from data.problems import Problem
from eval.grade import load_gradable
from rivet.config import setting


@dataclass
class TrainingProblems:
    """A file of problems, or the mini-world's; mixed into a command's settings."""

    problems: str = setting(
        "miniworld", "Training problems: a .jsonl or .jsonl.gz file, or `miniworld`."
    )
    problems_per_family: int = setting(
        1500, "Training problems of each mini-world family, at least 1."
    )
    families: list[str] = setting([], "Families of the mini-world to train on; empty: all.")

    def check_problems(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            ValueError: What is wrong, and what is expected.
        """
        if self.problems_per_family < 1:
            raise ValueError(
                f"problems_per_family is {self.problems_per_family}; expected at least 1"
            )
        check_families(self.families)

    def read_problems(self, seed: int) -> list[Problem]:
        """The problems, those of the mini-world drawn with `seed`.

        Raises:
            ProblemFileError: The file is missing or broken.
            GoldError: A problem of it cannot be graded against.
        """
        if self.problems == "miniworld":
            return build_split("train", self.problems_per_family, seed, self.families)
        return load_gradable(self.problems)
