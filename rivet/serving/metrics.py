"""What `/metrics` shows, in Prometheus' text format. No label holds anything that a user wrote."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from rivet.serving.gate import Gate
from rivet.trajectory import Trajectory

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server; each has a registry of its own.

    Args:
        gate: Its numbers of running and waiting completions are shown.
    """

    def __init__(self, gate: Gate) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory and CPU of this process
        running = Gauge("rivet_running", "Completions being sampled.", registry=registry)
        running.set_function(lambda: gate.running)
        waiting = Gauge("rivet_waiting", "Completions waiting for a place.", registry=registry)
        waiting.set_function(lambda: gate.waiting)
        self._requests = Counter(
            "rivet_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rivet_request_seconds",
            "Time from a chat request to the end of its reply.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._completions = Counter(
            "rivet_completions", "Completions by how they ended.", ["finish"], registry=registry
        )
        self._tokens = Counter(
            "rivet_tokens",
            "Tokens: of prompts, sampled, and spliced in by the environment.",
            ["source"],
            registry=registry,
        )
        self._programs = Counter(
            "rivet_programs",
            "Programs run in the sandbox, by outcome.",
            ["status"],
            registry=registry,
        )

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is a path that the server knows, or `other`."""
        self._requests.labels(route, str(status)).inc()
        if route == "/v1/chat/completions":
            self._seconds.observe(seconds)

    def fault(self) -> None:
        """Count a completion that an infrastructure fault ended."""
        self._completions.labels("fault").inc()

    def trajectory(self, trajectory: Trajectory) -> None:
        """Count a completion."""
        self._completions.labels(trajectory.finish).inc()
        self._tokens.labels("prompt").inc(len(trajectory.prompt_ids))
        for segment in trajectory.segments:
            source = "sampled" if segment.author == "controller" else "environment"
            self._tokens.labels(source).inc(len(segment))
        for run in trajectory.code_runs:
            self._programs.labels(run.status).inc()
