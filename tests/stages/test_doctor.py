"""`rivet doctor` names what is there and what is missing, what it costs, and shows no key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages import doctor
from stages.doctor import Finding, report


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """What is found in a folder with an experts.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experts.yaml").write_text(
        "experts:\n  - name: a\n    key_env: ONE_KEY\n  - name: b\n    key_env: OTHER_KEY\n"
    )
    monkeypatch.setenv("ONE_KEY", "sk-secret-one")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("RIVET_API_KEY", raising=False)
    monkeypatch.delenv("OTHER_KEY", raising=False)
    return {finding.name: finding for finding in doctor.examine(tmp_path)}


def test_every_part_is_looked_at(findings: dict[str, Finding]) -> None:
    assert {"Python", "torch", "transformers", "torch device", "sandbox", "disk"} <= set(findings)
    assert findings["Python"].state == findings["torch"].state == "ok"
    assert ">=2.13,<2.14" in findings["torch"].found.replace("<2.14,>=2.13", ">=2.13,<2.14")
    assert all(f.cost and f.remedy for f in findings.values() if f.state != "ok")


def test_keys_are_named_and_never_shown(findings: dict[str, Finding]) -> None:
    states = {name: findings[name].state for name in ("HF_TOKEN", "ONE_KEY", "OTHER_KEY")}
    assert states == {"HF_TOKEN": "ok", "ONE_KEY": "ok", "OTHER_KEY": "missing"}
    assert findings["RIVET_API_KEY"].state == "missing"
    assert "secret" not in report(list(findings.values()))


@pytest.mark.parametrize(
    ("name", "tested", "state"),
    [("pytest", ">=9", "ok"), ("pytest", "<2", "broken"), ("no-such-package", ">=1", "broken")],
)
def test_versions_are_held_against_the_tested_range(name: str, tested: str, state: str) -> None:
    finding = doctor._package(name, tested)
    assert finding.state == state
    assert state == "ok" or (finding.cost and f"{name}{tested}" in finding.remedy)


def test_an_uninstalled_rivet_is_named() -> None:
    assert [f.state for f in doctor.packages("no-such-distribution")] == ["broken"]


def test_a_part_that_fails_costs_its_own_line() -> None:
    def fail() -> Finding:
        raise OSError("no such device")

    finding = doctor._guarded("disk", fail)
    assert finding.state == "broken" and "no such device" in finding.found


@pytest.mark.parametrize(
    ("states", "code", "last"),
    [
        (["ok"], 0, "Everything is there."),
        (["ok", "missing"], 0, "1 optional part is not"),
        (["broken", "missing"], 1, "1 required part is missing"),
    ],
)
def test_the_exit_code_speaks_of_required_parts(
    states: list[Any], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = [Finding(f"part {n}", state, "x", "cost", "way") for n, state in enumerate(states)]
    monkeypatch.setattr(doctor, "examine", lambda folder: iter(made))
    assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert last in out and ("get it: way" in out) == (states != ["ok"])
    assert doctor.main(["--json"]) == code
    assert [f["state"] for f in json.loads(capsys.readouterr().out)] == states
