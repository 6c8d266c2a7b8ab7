"""A sandbox shared by the tests of a module, with short limits so that attacks end soon."""

import pytest
from attack_suite import SHORT

from sandbox import PythonSandbox


@pytest.fixture(scope="module")
def box():
    with PythonSandbox(SHORT, slots=2) as opened:
        yield opened
