"""An endpoint that misbehaves on demand, and an expert that is served there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from misbehaving import Misbehaving, serving

from rivet.experts.config import ExpertConfig


@pytest.fixture
async def server() -> AsyncIterator[Misbehaving]:
    async with serving() as state:
        yield state


@pytest.fixture
def config(server: Misbehaving) -> Callable[..., ExpertConfig]:
    """Makes an expert at the misbehaving server, without retries unless asked for."""

    def make(**fields: Any) -> ExpertConfig:
        base = {"name": "algebra", "model": "m", "base_urls": (server.url,)}
        return ExpertConfig(**(base | {"timeout_s": 20.0, "max_retries": 0} | fields))

    return make
