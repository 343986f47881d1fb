"""A stand-in for the coordinator, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.browser.stand_in import StandIn, standing_in


@pytest.fixture
async def stand_in() -> AsyncIterator[StandIn]:
    async with standing_in() as made:
        yield made
