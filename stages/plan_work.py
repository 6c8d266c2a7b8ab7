"""What a run does, by its recipe and stated assumptions: tokens, calls, money, hours, disk.

Arithmetic is 2 floating-point operations per parameter and token forward, twice that backward, and
once more forward where activations are recomputed (Sec. 2.1, arXiv:2001.08361); attention's own
products are left out, as they are small beside at the lengths planned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rivet.experts.config import ExpertConfig
from stages.plan_memory import Shape, trainable

_TOKEN_BYTES = 6  # of a stored trajectory: id, author, log-probability, compressed


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a recipe does not say. Every one of them is printed with a plan.

    Attributes:
        prompt_length: Tokens of a prompt.
        completion_length: Tokens of a completion, spliced ones included.
        spliced_share: Share of them that experts and the sandbox wrote.
        calls_per_rollout: Consultations of a trajectory.
        request_length: Tokens that an expert reads in one.
        reply_length: Tokens that an expert writes in one.
        generation_tokens_per_s: Sampled by one server, all its requests together.
        servers: That sample at the same time.
        tflops: Dense 16-bit peak of one device, in 10^12 operations a second.
        utilization: Share of it that training reaches.
    """

    prompt_length: int
    completion_length: int
    spliced_share: float
    calls_per_rollout: float
    request_length: int
    reply_length: int
    generation_tokens_per_s: float
    servers: int
    tflops: float
    utilization: float


@dataclass(frozen=True, slots=True)
class Work:
    """Totals of a run. Hours of sampling and of learning add up: they take turns.

    Attributes:
        rollouts: Trajectories that are sampled.
        sampled_tokens: Written by the controller.
        trained_tokens: Tokens of prompts and completions that pass through the learner.
        expert_calls: Consultations.
        expert_tokens: Tokens that experts read and write.
        usd: Of these, at the prices of the experts file, each expert asked equally often.
        sampling_h, learning_h: Hours.
        disk_gb: Trainer checkpoints, results and trajectories, in 10^9 bytes.
    """

    rollouts: int
    sampled_tokens: float
    trained_tokens: float
    expert_calls: float
    expert_tokens: float
    usd: float
    sampling_h: float
    learning_h: float
    disk_gb: float


def work(
    shape: Shape,
    assumed: Assumptions,
    *,
    rollouts: int,
    trained_rows: float,
    experts: Sequence[ExpertConfig],
    lora_r: int,
    has_checkpointing: bool,
    devices: int,
    checkpoints: int,
    weight_bytes: int = 4,
) -> Work:
    """Add a run up.

    Args:
        shape: Of the controller.
        assumed: See `Assumptions`.
        rollouts: Trajectories that are sampled with experts at hand; 0 for Stage II.
        trained_rows: Rows that pass through the learner, each epoch counted; 0 for collection.
        experts: With their prices; none costs nothing.
        lora_r: Rank of the adapter; 0 trains everything.
        has_checkpointing: Whether activations are recomputed.
        devices: That train.
        checkpoints: Trainer checkpoints kept at a time.
        weight_bytes: Of a stored weight.
    """
    sampled = rollouts * assumed.completion_length * (1 - assumed.spliced_share)
    trained = trained_rows * (assumed.prompt_length + assumed.completion_length)
    calls = rollouts * assumed.calls_per_rollout
    per_call = [e.cost_usd(assumed.request_length, assumed.reply_length) for e in experts]
    # Without gradients of frozen weights the backward pass costs half.
    passes = 2 + (2 if lora_r else 4) + (2 if has_checkpointing else 0)
    speed = devices * assumed.tflops * 1e12 * assumed.utilization
    rows_kept = rollouts or trained_rows
    tokens_kept = rows_kept * (assumed.prompt_length + assumed.completion_length)
    weights = weight_bytes * shape.parameters
    # An adapter's checkpoint holds the adapter; the optimizer has two moments of what is trained.
    kept = (4 + 8) * trainable(shape, lora_r)
    return Work(
        rollouts=rollouts,
        sampled_tokens=sampled,
        trained_tokens=trained,
        expert_calls=calls,
        expert_tokens=calls * (assumed.request_length + assumed.reply_length),
        usd=calls * (sum(per_call) / len(per_call) if per_call else 0.0),
        sampling_h=sampled / (assumed.generation_tokens_per_s * assumed.servers) / 3600,
        learning_h=passes * shape.parameters * trained / speed / 3600,
        disk_gb=((checkpoints * kept + weights if trained_rows else 0) + _TOKEN_BYTES * tokens_kept)
        / 1e9,
    )
