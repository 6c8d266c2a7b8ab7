"""The circuit of an endpoint: closed, open, and one request on trial."""

from __future__ import annotations

import math

import pytest

from rivet.experts.circuit import Circuit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circuit(clock) -> Circuit:
    return Circuit(3, 5.0, clock=clock)


def fail(circuit: Circuit) -> None:
    circuit.fail(circuit.begin(), "connection: refused")


def test_failures_in_a_row_open_it_and_a_success_between_does_not(circuit):
    for _ in range(5):
        fail(circuit)
        fail(circuit)
        circuit.succeed(circuit.begin())
    assert (circuit.state, circuit.ready_in()) == ("closed", 0.0)
    for _ in range(3):
        fail(circuit)
    assert (circuit.state, circuit.ready_in()) == ("open", 5.0)
    assert circuit.last_failure == "connection: refused"


def test_after_the_cooldown_one_request_is_on_trial(circuit, clock):
    for _ in range(3):
        fail(circuit)
    clock.now = 5.0
    assert (circuit.state, circuit.ready_in()) == ("half-open", 0.0)
    assert circuit.begin()
    assert circuit.ready_in() == math.inf, "nobody else until the trial ends"
    circuit.succeed(True)
    assert (circuit.state, circuit.ready_in()) == ("closed", 0.0)


def test_a_failed_trial_doubles_the_cooldown_up_to_a_minute(circuit, clock):
    for _ in range(3):
        fail(circuit)
    seen = []
    for _ in range(6):
        clock.now += circuit.ready_in()
        fail(circuit)
        seen.append(circuit.ready_in())
    assert seen == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    clock.now += 60
    circuit.succeed(circuit.begin())
    for _ in range(3):
        fail(circuit)
    assert circuit.ready_in() == 5.0, "a success forgets the past"


def test_a_trial_that_is_given_up_is_free_for_the_next(circuit, clock):
    for _ in range(3):
        fail(circuit)
    clock.now = 5.0
    circuit.release(circuit.begin())
    assert circuit.ready_in() == 0.0


def test_what_was_sent_before_it_opened_neither_prolongs_nor_ends_a_trial(circuit, clock):
    old = [circuit.begin() for _ in range(4)]
    for _ in range(3):
        fail(circuit)
    circuit.fail(old[0], "late")
    assert circuit.ready_in() == 5.0
    clock.now = 5.0
    assert circuit.begin()
    circuit.fail(old[1], "late")
    circuit.release(old[2])
    assert circuit.ready_in() == math.inf, "the trial is still under way"
    circuit.succeed(old[3])
    assert circuit.state == "closed", "an answer is an answer"


def test_a_pause_is_kept_and_the_longer_one_counts(circuit, clock):
    circuit.pause(3.0)
    circuit.pause(1.0)
    assert (circuit.state, circuit.ready_in()) == ("closed", 3.0)
    clock.now = 3.0
    assert circuit.ready_in() == 0.0
