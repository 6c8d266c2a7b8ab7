"""The bench runs, counts tokens rightly and ends with one JSON object."""

from __future__ import annotations

import json

import pytest

from rivet.rollout import bench


def test_the_bench_ends_with_its_figures_as_json(capsys, monkeypatch) -> None:
    small = {"uniform": bench.Load([[1, 2], [3, 4]], [[3, 3]], [])}
    small["spliced"] = bench.Load([[1, 2], [3, 4]], [[2, 4], [3, 1]], [[5], [6]])
    monkeypatch.setattr(bench, "build_loads", lambda *_: small)
    assert bench.main(["--batch", "2", "--rounds", "1"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for part in (figures["clock"], figures["cpu"]):
        for load in small:
            row = part[load]
            ratio = pytest.approx(row["local"] / row["generate"], rel=0.2, abs=0.01)
            assert row["to_generate"] == ratio
            assert row["to_fastest"] <= row["to_generate"]


def test_ratios_are_medians_over_rounds() -> None:
    rates = {"x": {"local": [10.0, 20.0, 30.0], "generate": [10.0, 5.0, 10.0], "loop": [20.0] * 3}}
    assert bench.summarise(rates)["x"] == {
        "local": 20,
        "generate": 10,
        "loop": 20,
        "to_generate": 3.0,
        "to_fastest": 1.0,
    }


def test_loads_have_the_promised_lengths() -> None:
    loads = bench.build_loads(64, 100, 0)
    (ragged,) = loads["ragged"].lengths
    assert (min(ragged), max(ragged), len(ragged)) == (8, 256, 64)
    assert loads["uniform"].tokens == 64 * 64
    first, second = loads["spliced"].lengths
    assert loads["spliced"].tokens == sum(first) + sum(second)
    assert all(max(prompt) < 100 for prompt in loads["spliced"].prompts)
