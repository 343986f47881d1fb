"""Plays the history of a seed: the seed determines its kind and its random numbers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common.core import ids
from coordinator.cluster import peers
from kvtransfer.links import shm
from tests.simulation import network
from tests.simulation.grammars import ONE_IN
from tests.simulation.history import History
from tests.simulation.situations import (
    Careless,
    Crammed,
    CrammedForks,
    Crowded,
    CutOff,
    Disconnected,
    Forgotten,
    Forlorn,
    Hung,
    Jammed,
    Misled,
    Muted,
    OneFault,
    Paused,
    Poisonous,
    Resized,
    Sick,
    Unaborted,
    Unheard,
    Unladen,
)
from tests.simulation.system import SimulatedSystem

KINDS: tuple[Callable[..., History], ...] = (
    Unladen,
    *(History,) * 5,
    Disconnected,
    partial(History, flavour="lonely"),
    partial(History, flavour="deaf"),
    partial(History, flavour="torn"),
    Hung,
    Jammed,
    Muted,
    Careless,
    Unheard,
    Crowded,
    Forlorn,
    Poisonous,
    Sick,
    Crammed,
    CrammedForks,
    Forgotten,
    Paused,
    Unaborted,
    Misled,
    CutOff,
    Resized,
)
"""The kinds of histories, used in turn. New ones are appended."""
STRIDE = 20
"""Distance between the random seeds of successive histories of a kind. It differs from the number of kinds, so that
adding a kind leaves the n-th history of the others unchanged."""


@dataclass
class HistoryOutcome:
    """How requests ended, which faults struck, and the longest pause of a stream (seconds) of one or more histories."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    longest_gap: float = 0.0
    widest: int = 0
    """The seed of the history with ``longest_gap``."""
    seconds: float = 0.0

    @classmethod
    def of(cls, kept: dict[str, Any]) -> HistoryOutcome:
        """Restore an outcome from its ``vars``, as read from JSON."""
        return cls(**kept | {"ends": Counter(kept["ends"]), "faults": Counter(kept["faults"])})

    def add(self, other: HistoryOutcome) -> None:
        self.ends += other.ends
        self.faults += other.faults
        self.tokens += other.tokens
        self.longest_gap, self.widest = max((self.longest_gap, self.widest), (other.longest_gap, other.widest))
        self.seconds += other.seconds


def run(seed: int) -> HistoryOutcome:
    """Play the history of ``seed``. Raises AssertionError or InvariantBroken if an invariant does not hold."""
    number, which = divmod(seed, len(KINDS))
    kind, rng = KINDS[which], Random(number * STRIDE + which)
    chance_of_masks = Random(f"masks {seed}")
    with _chance(rng):
        one_fault = isinstance(kind, type) and issubclass(kind, OneFault)
        system = SimulatedSystem(rng, chance_of_masks, one_fault=one_fault, constrains=seed % ONE_IN == 0)
        endpoints = mock.patch.multiple(shm, PoolEndpoint=system.pools.endpoint, PoolConnection=system.pools.connect)
        try:
            with _alarmed(system), endpoints, system.mask_times.apply():
                kind(system, rng).play()
        finally:
            network.forget()
    return _outcome(system, seed)


class _Alarm(logging.Handler):
    """Turns errors in the log into problems, since the real code continues after logging them."""

    def __init__(self, system: SimulatedSystem) -> None:
        super().__init__(logging.WARNING)
        self._system = system

    def _silent(self, record: logging.LogRecord) -> None:
        """Complain if a worker is declared dead without a reason."""
        message = record.getMessage()
        if any(f"is gone: {how}" in message for how in ("silent", "one turn", "no answer")):
            name = message.split()[1]
            if name in self._system.lossy:
                self._system.not_heard(name)
            elif name not in self._system.suspects:
                self._system.complain(f"{name} is taken for dead though nothing was wrong with it")

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None and record.levelno < logging.ERROR:
            self._silent(record)
            return
        if self._system.sick and "a request failed in the engine" in record.getMessage():
            return
        why = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        self._system.complain(f"{record.name}: {record.getMessage()}{why}")


@contextmanager
def _alarmed(system: SimulatedSystem) -> Iterator[None]:
    """Send the log to the alarm; show it only at debug level."""
    log, alarm = logging.getLogger("tandem"), _Alarm(system)
    log.addHandler(alarm)
    log.propagate = log.isEnabledFor(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(alarm)
        log.propagate = True


@contextmanager
def _chance(rng: Random) -> Iterator[None]:
    """Draw ids from the seed, and use the same hand-off secrets in every history."""
    source = SimpleNamespace(token_bytes=rng.randbytes, token_hex=lambda n: rng.randbytes(n).hex())
    tokens = SimpleNamespace(token_bytes=Random(0).randbytes)  # secrets are only compared; their values do not matter
    with mock.patch.object(ids, "secrets", source), mock.patch.object(peers, "secrets", tokens):
        yield


def _outcome(system: SimulatedSystem, seed: int) -> HistoryOutcome:
    return HistoryOutcome(
        Counter(client.ends[0] for client in system.clients),
        Counter(system.network.happened),
        sum(len(output) for client in system.clients for output in client.output),
        max((client.longest_gap for client in system.clients), default=0.0),
        seed,
        system.clock.now,
    )
