"""Loads of these tests do not collect garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest import mock

import pytest

from bench.load import run


@pytest.fixture(scope="module", autouse=True)
def garbage() -> Iterator[mock.Mock]:
    """Stand in for the ``gc`` of loads: with torch imported, a collection takes half a second of CPU time, and
    ``gc.unfreeze`` would return to later collections all that the session has frozen."""
    with mock.patch.object(run, "gc", mock.create_autospec(gc)) as stand_in:
        yield stand_in
