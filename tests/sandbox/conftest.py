"""A sandbox shared by the tests of a module, with short limits so that attacks end soon."""

import pytest

from sandbox import PythonSandbox, SandboxLimits

SHORT = SandboxLimits(cpu_s=1.0, wall_s=2.0)


@pytest.fixture(scope="module")
def box():
    with PythonSandbox(SHORT, slots=2) as opened:
        yield opened
