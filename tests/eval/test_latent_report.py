"""The report of latent runs: what it draws of a study's means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.latent_report import write_latent_report
from eval.metrics import half_width


@pytest.mark.parametrize(
    ("values", "told"),
    [([0.65], "full: 65.0%<"), ([0.6, 0.7], "full: 65.0%, 95% interval 1.5% to 100.0%<")],
)
def test_the_mean_of_one_seed_has_no_interval(
    tmp_path: Path, values: list[float], told: str
) -> None:
    mean = {"arm": "full", "condition": "as trained", "family": "hard", "accuracy": 0.65}
    found = {"runs": [], "rows": [mean | {"half_width": half_width(values)}], "gates": []}
    (tmp_path / "results.json").write_text(json.dumps(found))
    text = write_latent_report(tmp_path).read_text(encoding="utf-8")
    assert told in text
