"""The attacks of a case file: every promise, on one long-lived sandbox.

RIVET_CASES names the folder with `sandbox_attacks.jsonl`; without such a folder these tests are
skipped, and `test_sandbox_attacks.py` alone holds the promises.
"""

from __future__ import annotations

import os
from pathlib import Path

import attack_suite
import pytest
from attack_suite import MODES

from sandbox import PythonSandbox, SandboxLimits

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(os.environ.get("RIVET_CASES", ROOT.parent / "shared" / "cases")) / (
    "sandbox_attacks.jsonl"
)
CASES = attack_suite.load(FILE) if FILE.exists() else []
LIMITS = SandboxLimits(cpu_s=1.5, wall_s=6.0)
NEED_SCRATCH = {"st_chdir"}
needs_file = pytest.mark.skipif(not CASES, reason=f"{FILE} is absent; set RIVET_CASES")


@pytest.fixture(scope="module")
def victim():
    with attack_suite.surroundings() as process:
        yield process


@pytest.fixture(scope="module", params=["full", *MODES])
def attacked(request, victim):
    disabled = MODES.get(request.param, ())
    with PythonSandbox(LIMITS, slots=1, _disabled=disabled) as box:
        yield box


@needs_file
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case_holds(attacked, case, victim):
    if case["id"] in NEED_SCRATCH and "scratch" in attacked.layers["missing"]:
        pytest.skip("writes a file; without a mount namespace there is no scratch folder")
    assert attack_suite.faults(attacked, case, victim) == [], case["must"]
