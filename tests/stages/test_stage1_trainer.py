"""The real trainer over scripted rollouts: which tokens receive gradient, and what TRL must keep.

The contract tests name the hooks of TRL 1.16.0 that `stages.stage1.trainer` overrides.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from stage1_world import (
    PROBLEMS,
    ScriptedSource,
    build_config,
    build_model,
    build_tokenizer,
    build_trainer,
    parameters,
    scripted,
)
from transformers.integrations import deepspeed

from rivet.protocol import parse
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Segment, Trajectory
from stages.stage1 import trainer as trainer_module
from stages.stage1.batches import (
    choices,
    is_void,
    parts_of_like_length,
    problem_order,
    roles_of,
    without_idle_rows,
)
from stages.stage1.health import FaultRateError
from stages.stage1.objective import TokenRoles, preset, token_weights
from stages.stage1.rollouts import Asked
from stages.stage1.trainer import Stage1Trainer


class GradientProbe:
    """Gradient of the loss at the hidden state that predicts each token, by trajectory.

    The last hidden state at position j enters the loss through the prediction of token j + 1 alone,
    so its gradient is exactly zero where that token is not trained.
    """

    def __init__(self, trainer: Stage1Trainer) -> None:
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.left_out: list[str] = []
        trainer.model.model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            output.last_hidden_state.retain_grad()
            self._calls.append((kwargs["input_ids"], output.last_hidden_state))

    def of(self, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient norms of its prompt tokens after the first, and of its completion."""
        ids = [*trajectory.prompt_ids, *trajectory.completion_ids]
        for input_ids, hidden in self._calls:
            for row in range(len(input_ids)):
                found = _find(input_ids[row].tolist(), ids)
                if found is not None:
                    assert hidden.grad is not None
                    norms = hidden.grad[row].norm(dim=-1)
                    start = found + len(trajectory.prompt_ids)
                    end = start + len(trajectory.completion_ids)
                    # Nothing behind the end, and nothing in the padding before the prompt.
                    assert norms[end - 1 :].eq(0).all() and norms[:found].eq(0).all()
                    return norms[found : start - 1], norms[start - 1 : end - 1]
        self.left_out.append(trajectory.id)  # in no forward pass
        return torch.zeros(1), torch.zeros(len(trajectory.completion_ids))


def _find(row: list[int], ids: list[int]) -> int | None:
    return next((n for n in range(len(row)) if row[n : n + len(ids)] == ids), None)


def one_step(folder: Path, make: Any, **changes: Any) -> tuple[GradientProbe, list[Trajectory]]:
    """Train one step of 2 groups of 4 through TRL's own loop."""
    trainer = build_trainer(
        folder, source=ScriptedSource(make), max_steps=1, save_strategy="no", **changes
    )
    probe = GradientProbe(trainer)
    trainer.train()
    return probe, TrajectoryStore(folder / "trajectories").load()


def by_index(rewards: list[float | None], **special: Any) -> Any:
    """Rollouts whose reward is that of their index in the group; `special` changes some."""

    def make(asked: Asked) -> Trajectory:
        t = scripted(asked, reward=rewards[asked.sample_index])
        return replace(t, **special.get(f"n{asked.sample_index}", {}))

    return make


def split(t: Trajectory, norms: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        author: norms[torch.tensor([a == author for a in t.authors])]
        for author in ("controller", "expert", "environment")
    }


# right, wrong, wrong, wrong: the first has a positive advantage, the others a negative one.
MIXED = [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("expert_loss", "good", "bad"),
    [
        ("paper", True, True),
        ("luffy", True, True),
        ("positive", True, False),
        ("ce", True, False),
        ("mask", False, False),
    ],
)
def test_who_receives_gradient(expert_loss: str, good: bool, bad: bool, tmp_path: Path) -> None:
    probe, trajectories = one_step(tmp_path, by_index(MIXED), expert_loss=expert_loss)
    assert len(trajectories) == 8
    for t in trajectories:
        prompt, completion = probe.of(t)
        norms = split(t, completion)
        assert prompt.eq(0).all(), "prompt tokens receive exactly none"
        assert norms["environment"].eq(0).all(), "environment output receives exactly none"
        assert norms["controller"].gt(0).all(), "every controller token receives some"
        expects = good if t.reward else bad
        assert norms["expert"].gt(0).all() if expects else norms["expert"].eq(0).all()


@pytest.fixture(params=["idle rows left out", "idle rows kept"])
def keeps_idle_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What is not trained receives no gradient, whether it is in the forward pass or not."""
    if request.param == "idle rows kept":
        monkeypatch.setattr(trainer_module, "without_idle_rows", lambda batch, *_: batch)
    return request.param == "idle rows kept"


def test_faults_and_void_trajectories_receive_exactly_none(
    keeps_idle_rows: bool, tmp_path: Path
) -> None:
    special = {
        "n2": {"fault": "expert_timeout", "outcome": None, "reward": None},
        "n3": {"answer": None, "expert_calls": (), "outcome": "no_answer"},
    }
    make = by_index(MIXED, **special)
    probe, trajectories = one_step(tmp_path, make, expert_loss="paper", max_fault_rate=1.0)
    for t in trajectories:
        prompt, completion = probe.of(t)
        has_gradient = t.sample_index in (0, 1)
        assert prompt.eq(0).all()
        assert completion.gt(0).any() if has_gradient else completion.eq(0).all()
    assert len(probe.left_out) == (0 if keeps_idle_rows else 4)
    # The void one counts in the baseline, the fault does not: rewards 1, 0, 0.
    advantages = {t.sample_index: t.info["advantage"] for t in trajectories}
    assert advantages[0] == pytest.approx(2 / 3 * math.sqrt(3), rel=1e-3)
    assert advantages[1] == advantages[3] == pytest.approx(-math.sqrt(3) / 3, rel=1e-3)
    assert advantages[2] == 0


def test_flat_groups_receive_exactly_none(keeps_idle_rows: bool, tmp_path: Path) -> None:
    probe, trajectories = one_step(tmp_path, by_index([1.0] * 4), expert_loss="paper")
    for t in trajectories:
        assert probe.of(t)[1].eq(0).all()
    # One row for each micro-batch stays, so that every one has something to compute.
    assert len(probe.left_out) == (0 if keeps_idle_rows else 6)


def test_leaving_idle_rows_out_keeps_order_and_trims_padding() -> None:
    batch = {
        "prompt_ids": torch.tensor([[0, 0, 5], [0, 6, 7], [8, 8, 8], [0, 0, 9]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": torch.tensor([[1, 2, 0], [3, 0, 0], [4, 4, 4], [5, 5, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]),
        "num_items_in_batch": torch.tensor(3.0),
    }
    is_trained = torch.tensor([True, True, False, False])
    kept = without_idle_rows(batch, is_trained, 2)
    assert kept["prompt_ids"].tolist() == [[0, 5], [6, 7]]
    assert kept["completion_ids"].tolist() == [[1, 2], [3, 0]]
    assert kept["num_items_in_batch"] == 3
    # Three trained rows and two parts: one idle row fills the second part.
    three = torch.tensor([False, True, True, True])
    assert without_idle_rows(batch, three, 2)["completion_ids"][:, 0].tolist() == [3, 4, 5, 1]


def test_parts_hold_rows_of_like_length_and_no_padding_of_others() -> None:
    lengths = [2, 5, 1, 4]
    ids = torch.tensor([[n] * length + [0] * (5 - length) for n, length in enumerate(lengths)])
    prompts = torch.tensor([[0, 7], [7, 7], [0, 7], [0, 7]])
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts > 0).long(),
        "completion_ids": ids,
        "completion_mask": torch.arange(5) < torch.tensor(lengths).unsqueeze(1),
        "num_items_in_batch": torch.tensor(12.0),
        "ref_per_token_logps": None,
    }
    split_in_order = [
        {k: v[n : n + 2] if k.endswith(("ids", "mask")) else v for k, v in batch.items()}
        for n in (0, 2)
    ]
    long, short = parts_of_like_length(split_in_order)
    assert long["completion_ids"].tolist() == [[1] * 5, [3] * 4 + [0]]
    assert short["completion_ids"].tolist() == [[0, 0], [2, 0]]
    assert [part["prompt_ids"].tolist() for part in (long, short)] == [[[7, 7], [0, 7]], [[7], [7]]]
    assert long["num_items_in_batch"] == 12 and long["ref_per_token_logps"] is None


def test_the_trainer_pads_each_part_to_its_own_longest_row(tmp_path: Path) -> None:
    def growing(asked: Asked) -> Trajectory:
        t = scripted(asked, reward=MIXED[asked.sample_index])
        again = t.segments[0]
        return replace(t, segments=(*t.segments, *([again] * asked.sample_index)))

    trainer = build_trainer(
        tmp_path, source=ScriptedSource(growing), max_steps=2, save_strategy="no"
    )
    masks: list[torch.Tensor] = []
    original = trainer._forward

    def spying(model: Any, inputs: dict[str, Any]) -> Any:
        masks.append(inputs["completion_mask"])
        return original(model, inputs)

    trainer._forward = spying  # type: ignore[method-assign]
    trainer.train()
    longest = [int(mask.sum(1).max()) for mask in masks]
    assert longest == [mask.size(1) for mask in masks]
    for first, second in (masks[:2], masks[2:]):
        assert first.sum(1).min() >= second.sum(1).max()


def test_an_empty_completion_is_survived_and_not_trained(tmp_path: Path) -> None:
    special = {"n3": {"segments": (), "fault": "backend", "outcome": None, "reward": None}}
    make = by_index(MIXED, **special)
    trainer = build_trainer(
        tmp_path, source=ScriptedSource(make), max_steps=1, save_strategy="no", max_fault_rate=1.0
    )
    before = parameters(trainer.model)
    trainer.train()
    assert any(not torch.equal(before[n], p) for n, p in parameters(trainer.model).items())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_the_step_equals_the_objective_written_out(tmp_path: Path) -> None:
    """Loss gradient of the real trainer = gradient of J by hand, over both micro-batches."""
    changes: dict[str, Any] = {
        "expert_loss": "luffy",
        "expert_weight": 0.7,
        "denominator": "separate",
        "negative_weight": 0.5,
        "route_weight": 8.0,
        "route_entropy": 0.08,
        "importance_clip": None,
        "max_grad_norm": 1e9,
    }
    gradients: dict[str, torch.Tensor] = {}
    trainer = build_trainer(
        tmp_path, source=ScriptedSource(by_index(MIXED)), max_steps=1, save_strategy="no", **changes
    )
    keep_gradients(trainer, gradients)
    trainer.train()
    trajectories = TrajectoryStore(tmp_path / "trajectories").load()
    expected = objective_gradient(trajectories)
    for name, gradient in gradients.items():
        assert torch.allclose(-gradient, expected[name], atol=2e-6), name


def keep_gradients(trainer: Stage1Trainer, into: dict[str, torch.Tensor]) -> None:
    step = trainer.training_step

    def keeping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        into.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
        return result

    trainer.training_step = keeping  # type: ignore[method-assign]


def objective_gradient(trajectories: list[Trajectory]) -> dict[str, torch.Tensor]:
    """J of `test_the_step_equals_the_objective_written_out`, trajectory by trajectory, unpadded."""
    model = build_model()
    tokens = [(t, n) for t in trajectories for n in range(len(t.completion_ids))]
    controller = sum(t.authors[n] == "controller" for t, n in tokens)
    expert = sum(t.authors[n] == "expert" for t, n in tokens)
    total = torch.zeros(())
    deviation = math.sqrt((9 / 16 + 3 / 16) / 3)
    for t in trajectories:
        assert t.reward is not None
        a = (t.reward - 0.25) / (deviation + 1e-4)
        ids = torch.tensor([[*t.prompt_ids, *t.completion_ids]])
        logits = model(input_ids=ids).logits[0, len(t.prompt_ids) - 1 : -1]
        logps = logits.log_softmax(-1)
        entropies = -(logps.exp() * logps).sum(-1)
        for n, token in enumerate(t.completion_ids):
            logp, author, kind = logps[n, token], t.authors[n], t.kinds[n]
            if author == "controller" and kind == "route":
                total = total + (8 * a * logp + 0.08 * entropies[n]) / controller
            elif author == "controller":
                total = total + (a if a > 0 else 0.5 * a) * logp / controller
            elif author == "expert":
                p = logp.exp()
                total = total + 0.7 * a * p / (p + 0.1) / expert
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_our_advantages_are_those_of_trl_where_both_are_defined(tmp_path: Path) -> None:
    rewards = [1.0, 0.0, None, 0.7]
    special = {"n2": {"fault": "x", "outcome": None, "reward": None}}
    seen: list[torch.Tensor] = []
    trainer = build_trainer(
        tmp_path,
        source=ScriptedSource(by_index(rewards, **special)),
        max_steps=1,
        save_strategy="no",
        max_fault_rate=1.0,
    )
    original = trl.GRPOTrainer._generate_and_score_completions

    def spy(self: Any, inputs: Any) -> Any:
        output = original(self, inputs)
        seen.append(output["advantages"].clone())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", spy)
        trainer.train()
    ours = [t.info["advantage"] for t in TrajectoryStore(tmp_path / "trajectories").load()]
    assert ours == pytest.approx(seen[0].tolist(), abs=1e-5)


# --- faults, order, void ------------------------------------------------------------------------


def test_a_run_with_too_many_faults_stops_before_it_writes_or_trains(tmp_path: Path) -> None:
    special = {
        f"n{n}": {"fault": "expert_timeout", "outcome": None, "reward": None} for n in range(4)
    }
    trainer = build_trainer(tmp_path, source=ScriptedSource(by_index(MIXED, **special)))
    before = parameters(trainer.model)
    with pytest.raises(FaultRateError, match="8 of 8 rollouts.*expert_timeout x8.*max_fault_rate"):
        trainer.train()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert TrajectoryStore(tmp_path / "trajectories").shards() == []


def test_problems_come_in_seeded_passes_without_repeats_in_a_step() -> None:
    order = problem_order(7, 3, 6, seed=1, shuffle=True)
    assert order == problem_order(7, 3, 6, seed=1, shuffle=True)
    assert order != problem_order(7, 3, 6, seed=2, shuffle=True)
    steps = [order[n : n + 3] for n in range(0, 18, 3)]
    assert all(len(set(step)) == 3 for step in steps)
    assert len(set(steps[0] + steps[1])) == 6  # one pass: 7 problems, the seventh is left out
    assert problem_order(4, 2, 3, seed=0, shuffle=False) == [0, 1, 2, 3, 0, 1]
    with pytest.raises(ValueError, match="2 problems, but one step takes 3"):
        problem_order(2, 3, 1, seed=0, shuffle=True)


def test_every_step_has_problems_of_each_stratum_in_proportion() -> None:
    strata = ["a"] * 12 + ["b"] * 6 + ["c"] * 6
    order = problem_order(24, 4, 12, seed=1, shuffle=True, strata=strata)
    for n in range(0, 48, 4):
        assert sorted(strata[row] for row in order[n : n + 4]) == ["a", "a", "b", "c"]
    assert sorted(order[:24]) == list(range(24)), "a pass has every problem"
    assert order[:24] != order[24:]
    assert order == problem_order(24, 4, 12, seed=1, shuffle=True, strata=strata)


def test_void_means_neither_answer_nor_action() -> None:
    t = scripted(Asked(PROBLEMS[0], 0, 1))
    assert not is_void(t)
    assert not is_void(replace(t, answer=None))
    assert not is_void(replace(t, expert_calls=()))
    assert is_void(replace(t, answer=None, expert_calls=()))


@pytest.mark.parametrize(
    ("text", "chosen", "is_made_up"),
    [
        ('<expert name="calc">add</expert>', "calc", [False]),
        ('<expert name="sagb">add</expert>', "sagb", [True]),
        ('<expert name="11472 *<expert name="calc">', "1calc", [True, False]),
        ('<expert name=" 4', " ", [True]),
        ('<expert name="calc', "c", [False]),
        ('<expert name="', "", []),
        ("<expert nam", "", []),
    ],
)
def test_a_name_that_is_made_up_is_a_choice_of_an_expert_too(
    text: str, chosen: str, is_made_up: list[bool]
) -> None:
    tokenizer = ProtocolTokenizer(build_tokenizer())
    ids = tokenizer.encode(text)
    scanner = parse(tokenizer, ids, ["controller"] * len(ids))
    t = replace(scripted(Asked(PROBLEMS[0], 0, 1)), segments=scanner.segments())
    assert [name not in ("calc", "sage") for _, name in choices(t, tokenizer)] == is_made_up
    roles = roles_of([t], len(ids) + 2, tokenizer, ["calc", "sage"])
    picked = [i for i, is_route in zip(ids, roles.route[0].tolist(), strict=False) if is_route]
    assert tokenizer.decode(picked) == chosen
    assert roles.made_up.sum() == sum(is_made_up)
    assert roles.controller[0].tolist() == [True] * len(ids) + [False] * 2


def test_the_trainer_tells_made_up_names_from_the_experts_it_has(tmp_path: Path) -> None:
    tokenizer = ProtocolTokenizer(build_tokenizer())

    def make(asked: Asked) -> Trajectory:
        name = ["calc", "sage", "calcx", "9"][asked.sample_index]
        ids = tuple(tokenizer.encode(f'<expert name="{name}">'))
        written = Segment("controller", "format", ids, (-1.0,) * len(ids))
        return scripted(asked, reward=MIXED[asked.sample_index], segments=(written,))

    seen: list[TokenRoles] = []
    trainer = build_trainer(tmp_path, source=ScriptedSource(make), max_steps=1, save_strategy="no")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer_module,
            "token_weights",
            lambda settings, roles, *rest, **more: (
                seen.append(roles) or token_weights(settings, roles, *rest, **more)
            ),
        )
        trainer.train()
    assert seen[0].route.sum(1).tolist() == [1] * 8
    assert seen[0].made_up.any(1).tolist() == [False, False, True, True] * 2


def test_what_an_expert_writes_is_nobodys_choice() -> None:
    tokenizer = ProtocolTokenizer(build_tokenizer())
    ids = tuple(tokenizer.encode('<expert name="calc">'))
    t = scripted(Asked(PROBLEMS[0], 0, 1))
    t = replace(t, segments=(Segment("expert", "reply", ids),))
    assert not roles_of([t], len(ids), tokenizer, []).route.any()


def test_every_trajectory_of_a_step_is_stored_with_verdict_and_advantage(tmp_path: Path) -> None:
    build_trainer(tmp_path, max_steps=3).train()
    store = TrajectoryStore(tmp_path / "trajectories")
    assert store.shards() == ["step-00001", "step-00002", "step-00003"]
    for step, shard in enumerate(store.shards(), start=1):
        rows = store.read_shard(shard)
        assert len(rows) == 8 and len({t.id for t in rows}) == 8
        assert {t.sample_index for t in rows} == {0, 1, 2, 3} and {t.step for t in rows} == {step}
        assert all(t.outcome and t.reward is not None and "advantage" in t.info for t in rows)


def test_metrics_of_authors_routes_and_rollouts_are_logged(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    logged = trainer.state.log_history[0]
    for name in (
        "controller/entropy controller/logp controller/rare_gradient expert/entropy expert/logp "
        "expert/rare_gradient route/entropy route/accuracy route/share/calc rollout/well_formed "
        "rollout/malformed rollout/fabricated_output rollout/fault_rate reward/mean "
        "reward/flat_groups sampling/logp_difference time/rollout_s"
    ).split():
        assert isinstance(logged[name], float), name


# --- contracts with TRL 1.16 --------------------------------------------------------------------


def test_written_against_this_version_of_trl() -> None:
    assert trl.__version__.startswith("1.16."), "read the overrides again before raising this"


def test_trl_calls_each_hook_as_we_override_it(tmp_path: Path) -> None:
    signature = inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies)
    assert list(signature.parameters)[:7] == [
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        "compute_entropy",
    ]
    assert list(inspect.signature(trl.GRPOTrainer._compute_loss).parameters)[1:] == [
        "model",
        "inputs",
    ]
    calls: list[int] = []
    original = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(self, *args, **kwargs)

    trainer = build_trainer(tmp_path, max_steps=1, save_strategy="no")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
        trainer.train()
    assert len(calls) == 2, "one forward pass for each of the two micro-batches"
    assert trainer._scores is None, "TRL's loss took the scores that we made"


def test_trl_hands_prompts_over_repeated_with_their_extra_keys(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Spying(ScriptedSource):
        def sample(self, asked: Any) -> list[Trajectory]:
            seen.append([one.id for one in asked])
            return super().sample(asked)

    build_trainer(
        tmp_path, source=Spying(), max_steps=1, save_strategy="no", shuffle_dataset=False
    ).train()
    assert seen == [[f"p{p}#{n}@1" for p in (0, 1) for n in range(4)]]


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_iterations": 2}, "num_iterations is 2; expected 1: a resumed run"),
        ({"steps_per_generation": 4}, "steps_per_generation is 4 .*accumulation_steps 2; expected"),
        ({"save_only_model": True}, "save_only_model is true"),
        ({"ignore_data_skip": True}, "ignore_data_skip is true"),
        ({"temperature": 0.0}, "temperature is 0.0; expected above 0"),
        ({"max_completion_length": 0}, "max_completion_length is 0; expected at least 1"),
        ({"seed": -1}, "seed is -1; expected 0 to"),
        ({"save_total_limit": 1}, "save_total_limit is 1; expected at least 2"),
        ({"save_strategy": "epoch"}, "expected steps or no"),
        ({"top_p": 0.9}, "what cannot be sampled cannot be learnt"),
        ({"mask_truncated_completions": True}, "counts as wrong"),
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; expected one of dapo"),
        ({"loss_type": "grpo"}, "divides by trajectories; expected denominator: all"),
        (
            {"loss_type": "grpo", "denominator": "all", "beta": 0.1},
            "beta is 0.1 with loss_type .grpo.; expected 0",
        ),
        ({"loss_type": "cispo"}, "epsilon_high is None; expected at least 1 with loss_type cispo"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold is 0.1; expected None"),
        ({"importance_sampling_level": "word"}, "'word'; expected one of token, sequence"),
        ({"scale_rewards": "std"}, "scale_rewards is 'std'; expected one of group"),
        ({"num_generations": 0}, "num_generations is 0; expected at least 2"),
        ({"per_device_train_batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"gradient_accumulation_steps": 0}, "accumulation_steps is 0; expected at least 1"),
        ({"max_steps": 0}, "max_steps is 0; expected at least 1, or -1"),
        ({"num_train_epochs": 0.0}, "num_train_epochs is 0.0; expected above 0"),
        ({"learning_rate": -1e-5}, "learning_rate is -1e-05; expected at least 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"epsilon": -0.1}, "epsilon is -0.1; expected at least 0"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0; expected null"),
        ({"resume_from_checkpoint": "x"}, "resume_from_checkpoint is 'x'; expected null"),
        ({"model": ""}, "model is not set"),
        ({"expert_weight": -1.0}, "expert_weight is -1.0"),
        ({"cost_per_call": -1.0}, "expected costs >= 0"),
        ({"min_well_formed": 1.5}, "min_well_formed is 1.5; expected 0 to 1"),
    ],
)
def test_impossible_settings_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(tmp_path, **changes)


def test_a_reference_that_would_lack_the_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    start: dict[str, Any] = {"model": str(tmp_path)}
    with pytest.raises(ValueError, match="beta is 0.1 and .* an adapter; expected 0, use_peft"):
        build_config(tmp_path, beta=0.1, **start)
    build_config(tmp_path, beta=0.1, use_peft=True, **start)  # its reference is the merged model
    build_config(tmp_path, **start)


@pytest.mark.parametrize("name", ["FSDP", "ZeRO-3"])
def test_sampling_from_a_model_spread_over_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "FSDP":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    else:
        zero3 = SimpleNamespace(is_zero3=lambda: True)
        monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: zero3)
    with pytest.raises(ValueError, match=f"backend is local with {name}; expected vllm"):
        build_config(tmp_path)
    build_config(tmp_path, backend="vllm", use_peft=True)


def test_a_preset_is_one_word_and_knobs_go_on_top(tmp_path: Path) -> None:
    assert build_config(tmp_path, expert_loss="paper").objective() == preset("paper")
    changed = build_config(tmp_path, expert_loss="luffy", expert_negative=0.0).objective()
    assert changed == preset("luffy", expert_negative=0.0)
