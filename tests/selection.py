"""Which tests a run has: all, a sample of the grids, or only those that are fast.

``--sample`` keeps, of a test that is marked ``sampled``, so many combinations of its parameters that every pair of
values of two parameters is among them (most faults show with one value or two); which ones is the same in every run.

``--fast`` keeps what needs neither torch nor another process: everything in the folders ``FAST``, except the modules,
marks and fixtures named below. An audit hook then refuses to import torch or transformers and to start a process, so
that a test which is not fast fails until it is marked. The call by which multiprocessing starts its processes raises no
audit event: it is replaced.
"""

from __future__ import annotations

import _posixsubprocess
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

SEED = 51
FAST = ("property", "unit")
"""Folders in which tests may be fast."""
NOT_FAST_MODULES = frozenset(
    f"{name}.py"
    for name in (
        # import torch
        *(
            "property/test_forged_control",
            "property/test_sampler",
            "unit/common/attention/test_backends",
            "unit/bench/commands/test_kernels",
            "unit/bench/builtin_model/test_training",
        ),
        *(
            "unit/common/engine/test_logits",
            "unit/common/engine/test_step",
            "unit/common/kernels/test_lending",
            "unit/common/kernels/test_layers",
        ),
        *(
            "unit/bench/eval/test_quality",
            "unit/harness/test_reference",
            "unit/common/engine/test_sampler",
            "unit/common/kernels/test_tiles",
            "unit/common/model/test_weights",
        ),
        # start processes in most of their tests (matplotlib does, to list the fonts there are)
        *(
            "unit/bench/commands/test_compare",
            "unit/bench/goals/test_goals",
            "unit/bench/peers/test_peers",
            "unit/bench/commands/test_plan",
        ),
        *(
            "unit/bench/commands/test_serve",
            "unit/deploy/cli/test_main",
            "unit/coordinator/test_process",
            "unit/common/platform/test_malloc",
        ),
        *("unit/harness/test_leaked_keys", "unit/harness/test_nothing_left_behind", "unit/bench/load/test_plots"),
    )
)
"""By their path under ``tests``."""
NOT_FAST_MARKS = frozenset({"alone", "e2e", "processes", "slow", "torch"})
NOT_FAST_FIXTURES = frozenset({"checkpoint", "mock_url"})
"""Made by torch, and a process."""
TESTS = Path(__file__).parent


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="of each grid some combinations, not all")
    parser.addoption("--fast", action="store_true", help="only tests without torch and without processes")


def is_ignored(path: Path, config: pytest.Config) -> bool:
    """Whether a file or folder is left out before it is imported."""
    if not config.getoption("--fast", False) or TESTS not in path.parents:
        return False
    inside = path.relative_to(TESTS)
    return inside.parts[0] not in FAST or inside.as_posix() in NOT_FAST_MODULES


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves in ``items`` what this run has, and reports the others as deselected."""
    kept = set(items)
    if config.getoption("--fast", False):
        kept = {item for item in kept if _is_fast(item)}
    if config.getoption("--sample", False):
        kept = {item for item in kept if not item.get_closest_marker("whole")}
        grids = defaultdict[Any, list[pytest.Function]](list)
        for item in items:
            if item.get_closest_marker("sampled") and isinstance(item, pytest.Function):
                grids[item.nodeid.partition("[")[0]].append(item)
        for grid in grids.values():
            kept -= set(grid) - set(sample(grid))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _is_fast(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return not marks & NOT_FAST_MARKS and not NOT_FAST_FIXTURES.intersection(getattr(item, "fixturenames", ()))


def sample(grid: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Items that show every pair of values of two parameters that any item of ``grid`` shows; the same ones in
    whatever order they come."""
    grid = sorted(grid, key=lambda item: item.nodeid)
    values = defaultdict[str, dict[int, int]](dict)  # parameter -> value, by identity -> its place among all
    combinations = [
        {name: values[name].setdefault(id(value), len(values[name])) for name, value in item.callspec.params.items()}
        for item in grid
    ]
    return [grid[index] for index in covering(combinations)]


def covering(combinations: Sequence[dict[str, int]]) -> list[int]:
    """Indices of some of ``combinations`` (parameter -> which of its values) in which all pairs of values occur."""
    pairs = [set(itertools.combinations(sorted(each.items()), min(2, len(each)))) for each in combinations]
    order = list(range(len(combinations)))
    random.Random(SEED).shuffle(order)
    seen, chosen = set[Any](), list[int]()
    for fresh in range(max(map(len, pairs), default=0), 0, -1):  # first those that show most
        for index in order:
            if len(pairs[index] - seen) >= fresh:
                chosen.append(index)
                seen |= pairs[index]
    return sorted(chosen)


def forbid_what_is_slow(config: pytest.Config) -> None:
    """With ``--fast``, and where tests run: before any test module is imported."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.getoption("--fast", False) and runs_tests:
        forbid()


def forbid() -> None:
    """From now on, for good, this interpreter imports no torch and starts no process."""
    sys.addaudithook(_refuse)
    _posixsubprocess.fork_exec = _refuse_process  # type: ignore[assignment]


def _refuse_process(*_: Any) -> NoReturn:
    raise AssertionError("a fast test starts a process (fork_exec): mark it `processes`")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "import":
        if str(arguments[0]).partition(".")[0] in ("torch", "transformers"):
            raise AssertionError(f"a fast test imports {arguments[0]}: its module belongs into NOT_FAST_MODULES")
    elif event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        raise AssertionError(f"a fast test starts a process ({event}): mark it `processes`")
