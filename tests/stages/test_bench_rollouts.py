"""The rollout bench gives both sides the same work, counts rightly and ends with its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rivet.rollout.bench import mini_model
from rivet.rollout.splice import Splicer
from rivet.settings import ProtocolSettings
from stages import bench_rollouts
from stages.bench_load import EXPERT, Load, build_tokenizer, draw_rows
from stages.bench_timeline import draw


@pytest.fixture(scope="module")
def load() -> Load:
    rows = draw_rows(6, max_calls=3, lengths=(48, 80), scale=0.01, seed=0)
    return Load(rows, build_tokenizer())


def test_latencies_have_the_promised_distribution() -> None:
    rows = draw_rows(4000, max_calls=3, lengths=(48, 112), scale=0.5, seed=1)
    waits = sorted(wait / 0.5 for row in rows for wait in row.latencies_s)
    assert waits[len(waits) // 2] == pytest.approx(1.0, rel=0.05)
    assert waits[len(waits) * 99 // 100] == pytest.approx(8.0, rel=0.2)
    assert {len(row.latencies_s) for row in rows} == {1, 2, 3}
    assert all(len(row.lengths) == len(row.latencies_s) + 1 for row in rows)


def test_both_sides_write_as_many_tokens_and_name_the_same_calls(load: Load) -> None:
    decode = load.tokenizer.decode
    for n, row in enumerate(load.rows):
        for turn, length in enumerate(row.lengths):
            tool, expert = load.tool_script(n, turn), load.expert_script(n, turn)
            assert len(tool) == len(expert) == length
            is_call = turn < len(row.latencies_s)
            number = str(load.call_number(n, turn))
            assert (f'"arguments": {{"call": {number}}}' in decode(tool)) == is_call
            assert (f'<expert name="{EXPERT}">{number}</expert>' in decode(expert)) == is_call
            assert not is_call or load.row_of_call(int(number)) == (n, turn)
    splicer = Splicer(load.tokenizer, ProtocolSettings(after_tag="").style)
    reply = [*splicer.open_reply(EXPERT), *splicer.foreign(load.reply)[0], *splicer.close_reply()]
    assert len(reply) == load.spliced


def test_turns_that_are_too_short_for_the_tags_are_refused(load: Load) -> None:
    rows = draw_rows(2, max_calls=1, lengths=(8, 8), scale=0.01, seed=0)
    with pytest.raises(ValueError, match="too short"):
        Load(rows, load.tokenizer)


def test_the_engine_samples_what_the_load_prescribes(load: Load) -> None:
    model, _ = mini_model(load.tokenizer, context=4096)
    with bench_rollouts.prescribed(load):
        seconds, spans = bench_rollouts.run_rivet(model, load, range(6))
    calls = sum(len(row.latencies_s) for row in load.rows)
    assert sum(what == "expert" for _, what, _, _ in spans) == calls
    assert sum(what == "sampling" for _, what, _, _ in spans) == calls + len(load.rows)
    assert seconds >= max(sum(row.latencies_s) for row in load.rows)
    with pytest.raises(RuntimeError, match="ended as"):  # it writes what it likes again
        bench_rollouts.run_rivet(model, load, range(6))


def test_ratios_are_medians_over_rounds_and_the_bound_is_the_longer_of_two() -> None:
    clock = {
        "rivet": [2.0, 4.0, 3.0],
        "work": [1.0, 4.0, 2.0],
        "longest": [2.0, 1.0, 2.5],
        "trl": [8.0, 8.0, 9.0],
    }
    figures = bench_rollouts.summarise(clock, clock)
    assert figures["bound_s"] == 2.5  # median of 2, 4, 2.5
    assert figures["to_bound"] == 1.0  # median of 1, 1, 1.2
    assert figures["faster_than_trl"] == 3.0  # median of 4, 2, 3
    assert "faster_than_lock_step" not in figures


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    spans = [(0, "sampling", 0.0, 1.0), (0, "expert", 1.0, 1.5), (1, "sampling", 0.0, 2.0)]
    for name in ("a.svg", "b.png"):
        draw({"rivet": spans, "trl": spans}, tmp_path / "new" / name)
        assert (tmp_path / "new" / name).stat().st_size > 1000


@pytest.mark.parametrize("arguments", [["--rows", "3"], ["--scale", "0"], ["--max_calls", "4"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_rollouts.main(arguments)


@pytest.mark.slow
def test_the_bench_ends_with_its_figures_as_json(capsys, tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    arguments = ["--rows", "4", "--rounds", "1", "--scale", "0.01", "--picture", str(picture)]
    assert bench_rollouts.main(arguments) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["wall_s"]) == {"rivet", "work", "longest", "trl", "lock_step"}
    assert figures["bound_s"] == max(figures["wall_s"]["work"], figures["wall_s"]["longest"])
    assert figures["rows"] == 4 and figures["sampled"] > 4 * 2 * 48
    assert picture.stat().st_size > 1000
