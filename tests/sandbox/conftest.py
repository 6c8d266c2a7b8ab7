"""A sandbox shared by the tests of a module, with short limits so that attacks end soon."""

import pytest

from sandbox import PythonSandbox, SandboxLimits

SHORT = SandboxLimits(cpu_s=0.5, wall_s=3.0)

# The reduced modes: what is missing on machines that refuse it, taken away on purpose.
NAMESPACES = ("user", "mount", "pid", "net", "ipc", "uts", "cgroup")
MODES = {"no-user-namespace": ("user",), "no-namespaces": NAMESPACES}


@pytest.fixture(scope="module")
def box():
    with PythonSandbox(SHORT, slots=2) as opened:
        yield opened
