"""A latent run from the warm start to its results: what is trained, kept, resumed and refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rivet.config import ConfigError
from rivet.interrupt import Interrupted
from rivet.latent.cache import CacheError, read_states
from rivet.latent.experts import ExpertSpec, FrozenExpert
from rivet.latent.policy import load_policy
from rivet.runs import RunDirError, RunFinishedError
from stages.export import ExportConfig
from stages.export import run as export
from stages.latent import export as latent_export
from stages.latent.config import LatentConfig
from stages.latent.main import run as run_latent
from stages.latent.run import run_arm
from stages.latent.source import LatentSource
from stages.latent.start import gather
from stages.latent.trainer import LatentTrainer
from stages.stage1.training import CollapseError
from tests.stages.latent_world import (
    FAMILIES,
    latent_config,
    scripted_grades,
    write_latent_world,
)

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def verdicts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentSource, "_graded", scripted_grades)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latent_world(tmp_path_factory.mktemp("latent-world"))


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of the full system, undisturbed."""
    folder = tmp_path_factory.mktemp("latent-runs") / "full"
    return folder, run_arm(latent_config(world, folder))


def weights(folder: Path) -> State:
    """Parameters of a saved policy."""
    return load_file(folder / "model.safetensors")


def interrupted_at(step: int) -> Callable[..., torch.Tensor]:
    """A `training_step` in which Ctrl-C is pressed."""
    steps = 0
    original = LatentTrainer.training_step

    def dies(self: LatentTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    return dies


def test_a_run_leaves_what_its_folder_promises(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    assert json.loads((folder / "results.json").read_text()) == results
    names = {p.name for p in folder.iterdir()}
    assert {"experts.json", "warm", "trajectories", "metrics.jsonl", "checkpoint"} <= names
    conditions = {row["condition"] for row in results["rows"]}
    expected = {"warm start", "as trained", "shuffled", "without llama", "without gpt"}
    assert conditions == expected
    assert {row["family"] for row in results["rows"]} == {*FAMILIES, "hard"}
    shares = results["attention"]["families"]["small"]["shares"]
    assert torch.tensor(shares).shape == (2, 2, 2, 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["attention/entropy_per_head"] > 0
    total = sum(lines[0][f"attention/share/small/{name}"] for name in ("llama", "gpt"))
    assert total == pytest.approx(1 - lines[0]["attention/empty"], abs=0.05)


def test_experts_are_frozen_and_theta_waits_for_the_adapter(
    world: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    folder, _ = finished
    for expert in json.loads((folder / "experts.json").read_text()):
        assert expert["digest_before"] == expert["digest_after"]
    warm, first, last = (
        weights(folder / name) for name in ("warm", "trainer/checkpoint-1", "checkpoint")
    )
    base = load_file(world / "policy" / "model.safetensors")
    embeddings = "model.language_model.embed_tokens.weight"
    phi = [name for name in warm if "context_adapter" in name]
    theta = [name for name in warm if "context_adapter" not in name]
    size = len(base["model.embed_tokens.weight"])
    assert torch.equal(warm[embeddings][:size], base["model.embed_tokens.weight"])
    assert all(torch.equal(warm[name], first[name]) for name in theta)
    assert any(not torch.equal(warm[name], first[name]) for name in phi)
    assert any(not torch.equal(first[name], last[name]) for name in theta)


def test_adapter_and_policy_learn_at_their_own_rates(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    state = torch.load(finished[0] / "trainer" / "checkpoint-2" / "optimizer.pt")
    names = [n for n, _ in load_policy(finished[0] / "checkpoint").named_parameters()]
    adapter = sum("context_adapter" in name for name in names)
    groups = {g["name"]: (len(g["params"]), g["lr"]) for g in state["param_groups"]}
    assert groups == {"adapter": (adapter, 1e-2), "policy": (len(names) - adapter, 1e-3)}


def test_the_saved_policy_names_its_experts_and_works_in_a_fresh_object(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    policy = load_policy(finished[0] / "checkpoint")
    assert [e["name"] for e in policy.config.experts] == ["llama", "gpt"]
    for given in policy.config.experts:
        spec = {k: given[k] for k in ("name", "path", "layers", "last_k", "dtype", "reading")}
        assert FrozenExpert.load(ExpertSpec(**spec)).fingerprint() == given["fingerprint"]


def test_a_killed_run_ends_with_the_same_weights(
    world: Path,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = latent_config(world, tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(LatentTrainer, "training_step", interrupted_at(2))
        with pytest.raises((KeyboardInterrupt, Interrupted)):
            run_arm(config)
    run_arm(config)
    undisturbed, resumed = (weights(f / "checkpoint") for f in (finished[0], tmp_path / "killed"))
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)
    with pytest.raises(RunFinishedError):
        run_arm(config)


def test_a_collapse_stops_the_run_which_is_neither_evaluated_nor_finished(
    world: Path, tmp_path: Path
) -> None:
    # A random policy ends no answer in a box.
    run, alarm = tmp_path / "run", {"collapse_alarm": "stop", "collapse_patience": 2}
    for _ in range(2):  # the same command again trains no further
        with pytest.raises(CollapseError, match=r"step 2: only 0% of the .*--collapse_alarm warn"):
            run_arm(latent_config(world, run, max_steps=3, **alarm))
        assert load_policy(run / "collapsed").config.experts
        assert not {"checkpoint", "results.json", "finished.json"} & {f.name for f in run.iterdir()}
    results = run_arm(latent_config(world, run, max_steps=3, **alarm | {"collapse_alarm": "warn"}))
    steps = [m["step"] for m in map(json.loads, open(run / "metrics.jsonl")) if "alarm" not in m]
    assert steps == [1, 2, 3] and results["rows"]


def test_the_alarm_of_a_run_that_goes_on_counts_the_steps_before(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = latent_config(
        world, tmp_path / "run", max_steps=3, collapse_alarm="stop", collapse_patience=2
    )
    with monkeypatch.context() as patch:
        patch.setattr(LatentTrainer, "training_step", interrupted_at(2))
        with pytest.raises((KeyboardInterrupt, Interrupted)):
            run_arm(config)
    with pytest.raises(CollapseError, match=r"stopped at step 2: "):
        run_arm(config)


def test_results_and_warm_start_that_were_cut_short_are_made_again(
    world: Path,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished[0], output)
    for name in ("results.json", "warm/rows.json"):
        (output / name).write_bytes((output / name).read_bytes()[:-10])
    with caplog.at_level("WARNING"):
        results = run_arm(latent_config(world, output))
    assert f"{output / 'warm' / 'rows.json'}: cut short" in caplog.text
    assert results["rows"] == finished[1]["rows"]
    assert json.loads((output / "results.json").read_text()) == results
    with pytest.raises(RunFinishedError):
        run_arm(latent_config(world, output))


def test_phi_alone_leaves_theta_untouched(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "phi"
    run_arm(latent_config(world, folder, train_policy=False, adapter_first_steps=0))
    warm, last = weights(folder / "warm"), weights(folder / "checkpoint")
    changed = {name for name in warm if not torch.equal(warm[name], last[name])}
    assert changed and all("context_adapter" in name for name in changed)


@pytest.mark.parametrize("loss_type", ["dapo", "luspo"])
def test_the_entropy_of_a_token_is_divided_by_what_its_advantage_is(
    loss_type: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[dict[str, Any]] = []
    original = LatentTrainer._compute_loss

    def watched(self: LatentTrainer, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        parts.append(inputs)
        return original(self, model, inputs)

    monkeypatch.setattr(LatentTrainer, "_compute_loss", watched)
    changes = {"loss_type": loss_type, "expert_loss": "paper", "max_steps": 1, "entropy": 0.5}
    run_arm(latent_config(world, tmp_path / "run", **changes))
    mask = torch.cat([part["tool_mask"] for part in parts])
    rows = int(mask.any(1).sum())
    assert rows < mask.sum()  # more tokens than rows
    divisor = {"dapo": mask.sum(), "luspo": rows}[loss_type]
    weights = torch.cat([part["entropy_weights"] for part in parts])
    torch.testing.assert_close(weights, mask * 0.5 / divisor)


@pytest.mark.parametrize("arm", ["single", "constant", "shuffled", "static", "one-expert"])
@pytest.mark.slow
def test_every_control_runs(arm: str, world: Path, tmp_path: Path) -> None:
    expert = "gpt" if arm == "one-expert" else ""
    results = run_arm(latent_config(world, tmp_path / "run", arm=arm, expert=expert))
    conditions = {row["condition"] for row in results["rows"]}
    assert {"warm start", "as trained"} <= conditions
    assert ("shuffled" in conditions) == (arm in ("static", "one-expert"))
    if arm == "one-expert":
        assert results["attention"]["families"]["small"]["by_expert"][0] == 0.0


@pytest.mark.slow
def test_lora_trains_beside_the_adapter_and_is_merged(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    run_arm(latent_config(world, folder, use_peft=True, lora_r=2, adapter_first_steps=0))
    saved, base = weights(folder / "checkpoint"), weights(folder / "warm")
    assert set(saved) == set(base)
    changed = {name for name in base if not torch.equal(saved[name], base[name])}
    assert any("q_proj" in name for name in changed)
    assert any("context_adapter" in name for name in changed)
    assert not any(
        "embed_tokens" in name or "norm" in name and "context" not in name for name in changed
    )


@pytest.mark.parametrize(
    "is_recomputed", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True)]
)
def test_whole_rows_train_to_what_shared_prompts_do_also_where_they_are_recomputed(
    is_recomputed: bool, world: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    changes = {"share_prompts": False, "gradient_checkpointing": is_recomputed}
    run_arm(latent_config(world, tmp_path / "whole", **changes))
    shared, whole = (weights(f / "checkpoint") for f in (finished[0], tmp_path / "whole"))
    for name in shared:
        torch.testing.assert_close(shared[name], whole[name], rtol=1e-2, atol=1e-3)


def test_a_poisoned_cache_stops_a_run(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = latent_config(world, run)
    experts = [FrozenExpert.load(spec) for spec in config.specs()]
    first = read_states(experts[:1], ["Calculate 0 + 0."], config.cache)
    (folder,) = Path(config.cache).iterdir()
    manifest = json.loads((folder / "expert.json").read_text())
    manifest["fingerprint"] = "another revision"
    (folder / "expert.json").write_text(json.dumps(manifest))
    assert len(first) == 1
    with pytest.raises(CacheError, match="describes another expert"):
        run_arm(config)


def test_a_world_of_other_settings_is_not_reused(tmp_path: Path) -> None:
    from stages.latent.world import WorldError, WorldSettings, open_world

    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(WorldError, match="other settings"):
        open_world(tmp_path, WorldSettings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": "one-expert"}, "expected an expert with the arm"),
        ({"arm": "one-expert", "expert": "bert"}, "expected one of llama, gpt"),
        ({"controls": ["full"]}, "other arms than full"),
        ({"controls": ["none"]}, "among full"),
        ({"adapter_width": 15}, "no multiple of 2 heads"),
        ({"beta": 0.1}, "beta is 0.1"),
        ({"warm_steps": -1}, "warm_steps is -1"),
        ({"backend": "vllm", "use_peft": True}, "expected local"),
        ({"adapter_learning_rate": 0.0}, "above 0"),
        ({"adapter_learning_rate": float("inf")}, "above 0 and finite"),
        ({"adapter_width": 0}, "adapter_width is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"problems": "latentworld"}, "a .jsonl file each"),
        ({"test_problems": ""}, "a .jsonl file each"),
        ({"model": "", "experts": [], "arm": "one-expert", "expert": "gpt"}, "one of primes"),
        ({"experts": []}, "expected both, or neither"),
        ({"experts": [{"name": "a", "path": "p"}, {"name": "a", "path": "q"}]}, "each once"),
        ({"arm": "single", "train_policy": False}, "train_policy is false"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing and share_prompts are true"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        latent_config(tmp_path, tmp_path / "run", **changes)


def test_settings_that_would_change_nothing_are_refused_all_at_once(tmp_path: Path) -> None:
    ignored = {"cost_per_call": 0.3, "rollout_deadline_s": 9.0, "mode": "local", "split": "test"}
    with pytest.raises(ConfigError) as error:
        latent_config(tmp_path, tmp_path / "run", **ignored, families=["gcd"], world_seed=2)
    named = [fault.partition(":")[0] for fault in error.value.faults]
    assert named == ["families", "mode", "rollout_deadline_s", "cost_per_call", "world_seed"]
    assert "families: got ['gcd'], expected it left out" in str(error.value)
    with pytest.raises(ConfigError, match=r"families: got \['primes'\], expected it left out"):
        LatentConfig(families=["primes"], world_seed=2)


def test_a_control_that_cannot_be_is_refused_before_the_first_arm(
    world: Path, tmp_path: Path
) -> None:
    config = latent_config(world, tmp_path / "run", train_policy=False, controls=["single"])
    with pytest.raises(ConfigError, match="controls: single: train_policy is false"):
        run_latent(config)
    assert not (tmp_path / "run").exists()


def _problems(folder: Path, world: Path, count: int, first_family: str = "small") -> str:
    """The first training problems in a file of their own, the first in a family of its choice."""
    lines = [json.loads(x) for x in (world / "train.jsonl").read_text().splitlines()[:count]]
    lines[0]["meta"]["family"] = first_family
    path = folder / f"{first_family}-{count}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_problems_that_cannot_make_a_run_are_refused_before_it_starts(
    world: Path, tmp_path: Path
) -> None:
    few, alone = _problems(tmp_path, world, 3), _problems(tmp_path, world, 8, "alone")
    hard, twins = _problems(tmp_path, world, 8, "hard"), tmp_path / "twins.jsonl"
    first = json.loads(Path(alone).read_text().splitlines()[0])
    twins.write_text(json.dumps(first | {"id": "twin"}) + "\n" + Path(alone).read_text())
    train, test = str(world / "train.jsonl"), str(world / "test.jsonl")
    refused: dict[str, dict[str, Any]] = {
        "gives 3 training problems; expected at least 4": {"problems": few},
        "test_problems: 8 of 8 are training problems too": {"test_problems": train},
        "^problems: one distinct problem only of the family 'alone'": {
            "arm": "shuffled",
            "problems": str(twins),
        },
        "test_problems: one distinct problem only": {"problems": test, "test_problems": alone},
        "train/0 is of the family 'hard'; expected": {"problems": test, "test_problems": hard},
    }
    for message, changes in refused.items():
        with pytest.raises(ConfigError, match=message):
            run_arm(latent_config(world, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_test_per_family_takes_the_first_of_each_family_and_says_what_is_left_out(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.loads(line) for line in (world / "test.jsonl").read_text().splitlines()]
    for family, part in (("small", rows), ("", [row | {"meta": {}} for row in rows])):
        path = tmp_path / f"sorted-{family}.jsonl"
        part = sorted(part, key=lambda row: row["meta"].get("family", ""))
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        config = latent_config(
            world, tmp_path / "run", test_problems=str(path), test_per_family=3, arm="single"
        )
        with caplog.at_level("INFO"):
            test = gather(config).test
        firsts = [row for row in part if row["meta"].get("family", "") == family][:3]
        others = [row for row in part if row["meta"].get("family", "") == "large"][:3]
        assert [p.id for p in test] == [row["id"] for row in others + firsts]
        assert f"{path}: the first 3 problems of each family are measured, " in caplog.text
        assert f"{8 - len(test)} of 8 are left out" in caplog.text


def test_models_that_cannot_take_part_are_refused_before_it_starts(
    world: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    latent = str(finished[0] / "checkpoint")
    llama = {"path": str(world / "llama"), "last_k": 2}
    cut = tmp_path / "cut"
    shutil.copytree(world / "policy", cut)
    broken = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(broken[: len(broken) // 2])
    twice = [{"name": "a", **llama}, {"name": "b", **llama}]
    refused: dict[str, dict[str, Any]] = {
        "a latent policy already; expected a causal": {"model": latent},
        "gone": {"model": str(tmp_path / "gone")},
        "model.safetensors: broken weights": {"model": str(cut)},
        "is a latent policy, which listens": {"experts": [{"name": "a", "path": latent}]},
        "experts a and b are the same model, read in the same way": {"experts": twice},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=message):
            run_arm(latent_config(world, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_the_run_of_one_stage_is_no_folder_for_arms(
    finished: tuple[Path, dict[str, Any]], world: Path
) -> None:
    before = (finished[0] / "results.json").read_bytes()
    with pytest.raises(RunDirError, match="a run folder already"):
        run_latent(latent_config(world, finished[0]))
    assert (finished[0] / "results.json").read_bytes() == before


def test_what_lies_in_the_way_of_a_run_is_left_alone(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    with pytest.raises(Exception, match="no run of ours"):
        run_arm(latent_config(world, tmp_path / "run"))
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_an_export_holds_policy_and_adapter_and_reloads_to_equal_logits(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / "export"
    config = ExportConfig(checkpoint=str(finished[0]), output_dir=str(target), tolerance=1e-6)
    assert export(config) == target
    card = (target / "README.md").read_text(encoding="utf-8")
    for expert in load_policy(target).config.experts:
        assert f"| {expert['name']} | {expert['path']} |" in card
        assert expert["fingerprint"] in card
    assert "| as trained | hard |" in card
    assert set(weights(target)) == set(weights(finished[0] / "checkpoint"))


@pytest.mark.slow
def test_an_export_that_is_not_its_policy_is_refused(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = latent_export.probe

    def other(folder: Path) -> State:  # of the policy: the export is loaded in another process
        given = probe(folder)
        return {**given, "logits": given["logits"] + 0.5}

    monkeypatch.setattr(latent_export, "probe", other)
    with pytest.raises(latent_export.LatentExportError, match=r"differ by 0\.5 after loading"):
        export(ExportConfig(str(finished[0]), str(tmp_path / "export")))
    assert not (tmp_path / "export").exists()


def test_an_export_carries_the_licences_that_it_is_given(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_export, "_verify", lambda source, folder: 0.0)
    target = tmp_path / "export"
    config = ExportConfig(
        str(finished[0]),
        str(target),
        base_model="meta-llama/Llama-3.2-1B",
        base_license="llama3.2",
        data=["openai/gsm8k: mit"],
    )
    text = (export(config) / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---")[1])
    assert head["license"] == "llama3.2" and head["base_model"] == "meta-llama/Llama-3.2-1B"
    assert head["datasets"] == ["openai/gsm8k"]
    assert "- base model, meta-llama/Llama-3.2-1B: llama3.2" in text and "apache" not in text
    assert not (target / "LICENSE").exists()
    export(ExportConfig(str(finished[0]), str(target), overwrite=True))
    text = (target / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0"
    assert (target / "LICENSE").is_file()


def test_an_export_refuses_settings_that_mean_nothing_for_a_latent_policy(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config = ExportConfig(
        str(finished[0]),
        str(tmp_path / "export"),
        adapter_only=True,
        results=["eval/results.json"],
        verify_problems=0,
    )
    with pytest.raises(ConfigError, match=r"adapter_only: .*\nresults: .*\nverify_problems: "):
        export(config)
    assert not (tmp_path / "export").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the run that it compares with, and 600 s for its own
def test_two_processes_do_what_one_does(
    world: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, "-m", "tests.stages.latent_world", str(world), str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone, together = (weights(f / "checkpoint") for f in (finished[0], tmp_path / "two"))
    for name in alone:
        torch.testing.assert_close(alone[name], together[name], rtol=1e-3, atol=2e-4)
