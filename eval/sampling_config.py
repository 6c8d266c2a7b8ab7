"""Settings of every command that samples graded rows: whom it asks, how, and how it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from eval.generate import SampleSpec
from rivet.config import setting
from rivet.rollout.backend import SamplingParams
from rivet.rollout.backend_settings import MAY_CHANGE, BackendSettings
from rivet.trajectory import Mode

# Settings that change how a run goes on, but no row of it.
NO_RESULT = ("batch_size", "shard_size", "max_attempts", "max_fault_rate", "ray", *MAY_CHANGE)


@dataclass
class SamplingConfig(BackendSettings):
    """What `eval.generate.sample` is told; mixed into a command's settings."""

    experts: str = setting(
        "embedded", "An experts.yaml, or `embedded`: the mini-world's own experts, on loopback."
    )
    samples_per_problem: int = setting(1, "k: samples of each problem, at least 1.")
    temperature: float = setting(0.0, "Sampling temperature, at least 0; 0 is greedy.")
    top_p: float = setting(1.0, "Nucleus mass in (0, 1].")
    top_k: int = setting(0, "Sample from the k most likely tokens only; 0 from all.")
    seed: int = setting(0, "Seed of the samples.")
    problems_seed: int = setting(0, "Seed that the mini-world's problems are drawn with.")
    max_completion_length: int | None = setting(
        None, "Tokens of a whole completion, spliced ones included; null: the checkpoint's limit."
    )
    batch_size: int = setting(96, "Trajectories in flight, at least 1.")
    shard_size: int = setting(256, "Rows per shard of the store, at least 1.")
    max_attempts: int = setting(3, "Tries of a row that infrastructure voids, at least 1.")
    max_fault_rate: float = setting(
        0.1, "Share of attempts that infrastructure may void before the run stops, in [0, 1]."
    )
    ray: int = setting(
        0,
        "Ray actors that share the rows out, each with an engine and a sandbox of its own; 0: this "
        "process alone.",
    )

    def check_sampling(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            ValueError: What is wrong, and what is expected.
        """
        for name in ("samples_per_problem", "batch_size", "shard_size", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.max_fault_rate <= 1:
            raise ValueError(f"max_fault_rate is {self.max_fault_rate}; expected 0 to 1")
        if self.ray < 0:
            raise ValueError(f"ray is {self.ray}; expected a number of actors, or 0")
        self.check_backend()
        self.sampling()  # checks the rest

    def sampling(self) -> SamplingParams:
        """How the controller samples."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)

    def how(self, mode: Mode) -> SampleSpec:
        """How the rows of a condition are sampled."""
        return SampleSpec(
            mode,
            self.sampling(),
            samples_per_problem=self.samples_per_problem,
            seed=self.seed,
            shard_size=self.shard_size,
            concurrency=self.batch_size,
            max_attempts=self.max_attempts,
            max_fault_rate=self.max_fault_rate,
        )
