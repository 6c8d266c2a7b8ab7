"""Paired differences: worked and exact numbers, simulated coverage, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedEngine, ScriptedGrader

from eval.compare import (
    CompareError,
    compare,
    compare_evaluations,
    describe,
    main,
    paired_difference,
)
from eval.conditions import ConditionError, read_condition, write_condition
from eval.generate import sample
from eval.results_file import ResultsError
from eval.summary import summarise
from rivet.rollout.backend import SamplingParams
from rivet.store import TrajectoryStore


async def evaluate(
    folder: Path, problems, prompts, *, mode="experts", seed=0, k=2, checkpoint="stage1"
) -> Path:
    """A finished condition in a folder."""
    rows = await sample(
        ScriptedEngine(prompts.tokenizer),
        ScriptedGrader(),
        problems,
        prompts=prompts,
        mode=mode,
        sampling=SamplingParams(),
        samples_per_problem=k,
        seed=seed,
        store=TrajectoryStore(folder / "trajectories"),
        progress=None,
    )
    write_condition(folder, {"checkpoint": checkpoint, "condition": mode, **summarise(rows)}, rows)
    return folder


def test_the_paired_difference_of_worked_numbers() -> None:
    # b - a is 1 six times, -0.5 and -1. At or below 0 are the sums without any of the six (4
    # subsets) and those of one of them with the -1, alone (6) or with the -0.5 too (6).
    a, b = [0, 0, 0, 0, 0, 0, 0.5, 1], [1, 1, 1, 1, 1, 1, 0, 0]
    result = paired_difference(a, b)
    assert result.value == pytest.approx(4.5 / 8) and result.n == 8
    assert result.p_value == pytest.approx(2 * 16 / 256)
    # 2.5% of 256 are six means, so the seventh is the bound: -1 (the empty subset's), -1, -0.75
    # and -0.5 are lowest, then the six of (1 - 1 - 0.5) / 3.
    assert (result.low, result.high) == pytest.approx((-0.5 / 3, 1))
    assert not result.is_real


def test_right_and_wrong_answers_give_the_exact_mcnemar_test() -> None:
    for better, worse, same in [(9, 1, 2), (5, 0, 7), (6, 0, 6), (4, 4, 1)]:
        a = [0] * better + [1] * (worse + same)
        b = [1] * better + [0] * worse + [1] * same
        changed = better + worse
        tail = sum(math.comb(changed, n) for n in range(worse + 1)) / 2**changed
        result = paired_difference(a, b, subsets=2**13)
        assert result.p_value == pytest.approx(min(1, 2 * tail))
        assert result.is_real == (2 * tail <= 0.05)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_below_six_problems_no_difference_is_real(n: int) -> None:
    result = paired_difference([0] * n, [1] * n)
    assert (result.low, result.high, result.is_real) == (-1, 1, False)
    assert result.p_value == 2 ** (1 - n)
    assert paired_difference([0] * 6, [1] * 6).is_real


def test_random_subsets_say_what_all_of_them_say() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.binomial(4, chance, 13) / 4 for chance in (0.4, 0.6))
    exact = paired_difference(a.tolist(), b.tolist(), subsets=2**13)
    drawn = paired_difference(a.tolist(), b.tolist(), subsets=2**13 - 1)
    assert drawn == paired_difference(a.tolist(), b.tolist(), subsets=2**13 - 1)  # seeded
    assert drawn != exact and drawn.p_value == pytest.approx(exact.p_value, abs=0.01)
    assert (drawn.low, drawn.high) == pytest.approx((exact.low, exact.high), abs=0.02)


def test_equal_runs_differ_by_nothing() -> None:
    result = paired_difference([0, 1, 0.5] * 3, [0, 1, 0.5] * 3)
    assert (result.value, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    assert not result.is_real


def test_pairing_finds_a_small_difference_that_separate_intervals_would_miss() -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(0, 2, 400).astype(float)
    b = a.copy()
    b[np.flatnonzero(a == 0)[:12]] = 1  # 3 points better, on the same problems
    result = paired_difference(a.tolist(), b.tolist())
    assert result.is_real and result.p_value < 0.01 and result.low < 0.03 < result.high


@pytest.mark.parametrize(("problems", "k"), [(4, 2), (7, 4), (12, 8), (120, 2)])
def test_without_a_difference_one_in_twenty_is_called_real_at_most(problems: int, k: int) -> None:
    rng = np.random.default_rng(0)
    runs, real = 300, 0
    for seed in range(runs):
        chance = rng.beta(0.5, 0.5, problems)
        a, b = rng.binomial(k, chance) / k, rng.binomial(k, chance) / k
        result = paired_difference(a.tolist(), b.tolist(), subsets=1000, seed=seed)
        assert result.is_real == (result.p_value <= 0.05)
        real += result.is_real
    assert real / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5
    assert real / runs >= 0.02 or problems < 12  # discrete: few problems are never so sure


@pytest.mark.parametrize("problems", [12, 60])
def test_the_interval_holds_a_true_difference(problems: int) -> None:
    rng = np.random.default_rng(0)
    runs, held = 300, 0
    for seed in range(runs):
        chance = rng.uniform(0, 0.8, problems)
        a, b = rng.binomial(8, chance) / 8, rng.binomial(8, chance + 0.2) / 8
        result = paired_difference(a.tolist(), b.tolist(), subsets=1000, seed=seed)
        held += result.low <= 0.2 <= result.high
    assert 0.92 <= held / runs <= 0.98


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(CompareError, match="got 1 and 2"):
        paired_difference([1], [1, 0])
    with pytest.raises(CompareError, match="at least one problem"):
        paired_difference([], [])


async def test_the_two_conditions_of_a_checkpoint_give_the_expert_removal_gap(
    problems, prompts, tmp_path, capsys
) -> None:
    a = await evaluate(tmp_path / "experts", problems, prompts)
    b = await evaluate(tmp_path / "local", problems, prompts, mode="local")
    result = compare(read_condition(a), read_condition(b))
    assert result["name"] == "expert-removal gap"
    # The scripted engine ignores the mode: no difference at all.
    assert result["overall"]["difference"] == 0 and not result["overall"]["is_real"]
    assert (result["a"], result["b"]) == ("stage1/experts", "stage1/local")
    assert "no difference can be told" in describe(result)
    assert main([str(a), str(b)]) == 0
    assert "expert-removal gap" in capsys.readouterr().out
    assert main([str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


async def test_the_difference_is_that_of_the_two_accuracies(problems, prompts, tmp_path) -> None:
    a = read_condition(await evaluate(tmp_path / "a", problems, prompts, seed=1))
    b = read_condition(
        await evaluate(tmp_path / "b", problems, prompts, seed=2, checkpoint="stage2")
    )
    result = compare(a, b)
    assert result["name"] == "step, experts"
    assert result["overall"]["difference"] == pytest.approx(
        b.results["accuracy"] - a.results["accuracy"]
    )


async def test_a_line_of_evaluations_gives_gaps_and_steps(problems, prompts, tmp_path) -> None:
    for n, checkpoint in enumerate(["warm", "stage1", "stage2"]):
        for mode in ("experts", "local") if n else ("experts",):
            await evaluate(
                tmp_path / checkpoint / mode,
                problems,
                prompts,
                mode=mode,
                seed=n,
                checkpoint=checkpoint,
            )
    found = compare_evaluations([tmp_path / c for c in ("warm", "stage1", "stage2")])
    assert [(c["name"], c["a"], c["b"]) for c in found] == [
        ("expert-removal gap", "stage1/experts", "stage1/local"),
        ("expert-removal gap", "stage2/experts", "stage2/local"),
        ("step, experts", "warm/experts", "stage1/experts"),
        ("step, experts", "stage1/experts", "stage2/experts"),
        ("step, local", "stage1/local", "stage2/local"),
    ]


async def test_runs_over_other_problems_or_another_k_are_refused(
    problems, prompts, tmp_path, capsys
) -> None:
    a = await evaluate(tmp_path / "a", problems, prompts)
    fewer = await evaluate(tmp_path / "fewer", problems[:-1], prompts)
    another_k = await evaluate(tmp_path / "k", problems, prompts, k=3)
    with pytest.raises(CompareError, match="differ in the problems or their golds"):
        compare(read_condition(a), read_condition(fewer))
    with pytest.raises(CompareError, match=r"samples per problem \(k\): 2 and 3"):
        compare(read_condition(a), read_condition(another_k))
    assert main([str(a), str(fewer)]) == 1
    assert "rivet compare:" in capsys.readouterr().err


async def test_other_prompts_are_refused_unless_allowed(problems, prompts, tmp_path) -> None:
    a = read_condition(await evaluate(tmp_path / "a", problems, prompts))
    b = read_condition(await evaluate(tmp_path / "b", problems, prompts))
    b.settings["prompts_digest"] = "another"
    with pytest.raises(CompareError, match="the prompts.*--across-prompts"):
        compare(a, b)
    assert compare(a, b, across_prompts=True)["overall"]["difference"] == 0


async def test_a_gap_is_of_conditions_that_were_sampled_alike(problems, prompts, tmp_path) -> None:
    a = read_condition(await evaluate(tmp_path / "a", problems, prompts))
    b = read_condition(await evaluate(tmp_path / "b", problems, prompts, mode="local"))
    assert compare(a, b)["name"] == "expert-removal gap"
    assert "checkpoints alone" not in describe(compare(a, b))
    b.settings["sampling"] |= {"temperature": 0.0}
    result = compare(a, b)
    assert result["name"] == "difference"
    assert "not of the checkpoints alone: temperature 1.0 and 0.0" in describe(result)


async def test_a_gap_is_of_one_checkpoint_whatever_it_is_called(
    problems, prompts, tmp_path
) -> None:
    a = read_condition(await evaluate(tmp_path / "a", problems, prompts))
    b = read_condition(await evaluate(tmp_path / "b", problems, prompts, mode="local"))
    a.settings["settings"], b.settings["settings"] = {"weights": "1"}, {"weights": "1"}
    assert compare(a, b)["name"] == "expert-removal gap"
    b.settings["settings"] = {"weights": "2"}
    assert compare(a, b)["name"] == "difference"


async def test_other_rules_limits_formats_and_experts_are_named(
    problems, prompts, tmp_path
) -> None:
    a = read_condition(await evaluate(tmp_path / "a", problems, prompts))
    b = read_condition(await evaluate(tmp_path / "b", problems, prompts, checkpoint="stage2"))
    expert = {"name": "calc", "model": "m1", "temperature": 0.0}
    settings = {
        "grading": "reward",
        "dtype": "float32",
        "limits": {"max_completion_length": 64, "max_expert_calls": 4},
        "experts": [expert],
        "weights": "1",
    }
    a.settings["settings"], b.settings["settings"] = settings, settings | {"weights": "2"}
    assert (compare(a, b)["name"], compare(a, b)["sampled_differently"]) == ("step, experts", [])
    for change, named in [
        ({"grading": "eval"}, "grading reward and eval"),
        ({"dtype": "bfloat16"}, "dtype float32 and bfloat16"),
        (
            {"limits": {"max_completion_length": 128, "max_expert_calls": 4}},
            "max_completion_length 64 and 128",
        ),
        ({"experts": [expert | {"model": "m2"}]}, "expert calc: model m1 and m2"),
        ({"experts": [expert, "numth"]}, "expert numth: name None and numth"),
    ]:
        b.settings["settings"] = settings | change
        result = compare(a, b)
        assert (result["name"], result["sampled_differently"]) == ("difference", [named])
        assert f"not of the checkpoints alone: {named}" in describe(result)
    b.settings["settings"] = settings | {"experts": []}  # that is what `local` is
    assert compare(a, b)["sampled_differently"] == []


async def test_a_folder_without_results_is_refused_with_a_hint(problems, prompts, tmp_path) -> None:
    condition = await evaluate(tmp_path / "run" / "local", problems, prompts)
    with pytest.raises(ConditionError, match="did you mean one of local in it"):
        read_condition(tmp_path / "run")
    for n in range(4):
        deep = tmp_path / "run" / f"seed-{n}" / "eval" / "local"
        deep.mkdir(parents=True)
        (deep / "scores.json").write_text("[]")
    with pytest.raises(ConditionError, match=r"local, seed-0/eval/local, .*\(5 in all\) in it"):
        read_condition(tmp_path / "run")
    with pytest.raises(ConditionError, match="run `rivet eval`"):
        read_condition(tmp_path / "none")
    results = condition / "results.json"
    whole = json.loads(results.read_text())
    results.write_text(json.dumps({k: v for k, v in whole.items() if k != "accuracy"}))
    with pytest.raises(ResultsError, match=r"results\.json: it has no accuracy"):
        read_condition(condition)
    results.write_text(json.dumps(whole))
    (condition / "scores.json").write_text("[")
    with pytest.raises(ResultsError, match=r"scores\.json: cannot be read"):
        read_condition(condition)
