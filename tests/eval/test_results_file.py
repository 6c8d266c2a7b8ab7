"""Files of results are read whole, or named with what is wrong in them and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.results_file import NUMBER, ResultsError, check_form, read_json, require

FORM = {
    "seed": int,
    "share?": NUMBER,
    "is_real?": bool,
    "by?": {str: [NUMBER, NUMBER]},
    "x?": [str],
}


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], "it is []; expected an object"),
        ({}, "it has no seed"),
        ({"seed": None}, "seed is null; expected an integer"),
        ({"seed": "1"}, 'seed is "1"; expected an integer'),
        ({"seed": True}, "seed is true; expected an integer"),
        ({"seed": 1, "share": "x"}, 'share is "x"; expected a number'),
        ({"seed": 1, "is_real": 1}, "is_real is 1; expected true or false"),
        ({"seed": 1, "by": {"gcd": 3}}, "by.gcd is 3; expected a list of 2"),
        ({"seed": 1, "by": {"gcd": [1, 2, 3]}}, "by.gcd is [1, 2, 3]; expected a list of 2"),
        ({"seed": 1, "by": {"gcd": [1, {}]}}, "by.gcd[1] is {}; expected a number"),
        ({"seed": 1, "x": {"a": 1}}, 'x is {"a": 1}; expected a list'),
        ({"seed": 1, "x": ["a", 5]}, "x[1] is 5; expected text"),
    ],
)
def test_what_is_of_another_form_is_told_with_its_place(value: Any, fault: str) -> None:
    with pytest.raises(ResultsError) as error:
        check_form(Path("r/results.json"), value, FORM)
    assert str(error.value) == f"r/results.json: {fault}: restore it, or run again what wrote it"


def test_what_is_of_the_form_is_given_back_with_all_that_nobody_asked_for() -> None:
    value = {"seed": 1, "share": None, "by": {"gcd": [0, 0.5]}, "x": [], "more": object()}
    assert check_form(Path("results.json"), value, FORM) is value


def test_a_file_is_absent_whole_or_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read_json(path) == {} and read_json(path / "below") == {}
    path.write_text('{"rows": [{"see')
    with pytest.raises(ResultsError, match=r"results\.json: cannot be read as JSON \(Untermin"):
        read_json(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ResultsError, match="cannot be read as JSON"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(ResultsError, match="it is \\[\\]; expected an object"):
        read_json(path)
    assert read_json(path, [str]) == []


def test_a_run_that_lost_a_file_is_told_how_to_write_it_again(tmp_path: Path) -> None:
    def remedy(file: str, stage: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"stage": stage}))
        with pytest.raises(ResultsError) as error:
            require(tmp_path / file)
        return str(error.value)

    config, finished = tmp_path / "config.json", tmp_path / "finished.json"
    again = f"run its command (in {config}) again, which goes on from there"
    missing = f"{tmp_path}/experts/results.json: no such file: "
    assert remedy("experts/results.json", "eval") == f"{missing}restore it, or {again}"
    finished.write_text("{}")
    told = remedy("experts/results.json", "eval")
    assert told == f"{missing}restore it, or remove {finished} and {again}"
    # A finished study is opened again as it is.
    assert remedy("results.json", "study").endswith(
        f"run `rivet study` for {tmp_path} again, which reads what is finished"
    )
    config.write_text("{")
    with pytest.raises(ResultsError, match="restore it, or move it away"):
        read_json(config)
