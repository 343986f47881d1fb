"""Selects which tests run: all, a sample of parameter combinations, or only the fast ones.

``--sample`` keeps, of a test marked ``sampled``, enough parameter combinations that every pair of values of two
parameters occurs (most faults show with one or two values). The choice is the same in every run.

``--fast`` keeps tests that need neither torch nor another process: everything in the folders ``FAST``, except the
modules, marks and fixtures named below. An audit hook then refuses imports of torch and transformers and the start of
processes, so a slow test fails until it is marked. multiprocessing starts its processes by a call that raises no audit
event, so that call is replaced.
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
"""Folders that may contain fast tests."""
NOT_FAST_MODULES = frozenset(
    f"{name}.py"
    for name in (
        # import torch
        *(
            "property/test_forged_control",
            "property/test_sampler",
            "unit/common/attention/test_backends",
            "unit/common/attention/test_choice",
            "unit/bench/gpu/test_gpu",
            "unit/bench/commands/test_kernels",
            "unit/bench/builtin_model/test_training",
        ),
        *(
            "unit/common/engine/test_logits",
            "unit/common/engine/test_parallel",
            "unit/common/engine/test_prompt_scores",
            "unit/common/engine/test_step",
            "unit/common/kernels/test_core_lease",
            "unit/common/kernels/test_layers",
        ),
        *(
            "unit/bench/eval/test_quality",
            "unit/harness/test_reference",
            "unit/common/engine/test_capture_audit",
            "unit/common/engine/test_constrained",
            "unit/common/engine/test_cuda_graphs",
            "unit/common/engine/test_device_steps",
            "unit/common/engine/test_gpu_loading",
            "unit/common/engine/test_gpu_roles",
            "unit/common/engine/test_graph_calls",
            "unit/common/engine/test_pool",
            "unit/common/engine/test_rank_gpus",
            "unit/common/engine/test_rank_graphs",
            "unit/common/engine/test_restrictions",
            "unit/common/engine/test_device_sampler",
            "unit/common/engine/test_sampler",
            "unit/common/kernels/test_tiles",
            "unit/common/kv/test_cuda_driver",
            "unit/common/model/test_gpu_layers",
            "unit/common/kernels/test_e4m3",
            "unit/common/kv/test_fp8",
            "unit/common/kv/test_slab",
            "unit/common/model/test_fp8",
            "unit/common/model/test_load",
            "unit/common/model/test_collective",
            "unit/common/model/test_process_group",
            "unit/common/kernels/test_compact_layers",
            "unit/common/kernels/test_groups",
            "unit/common/model/test_compact",
            "unit/common/quantization/test_panels",
            "unit/common/quantization/test_gguf_blocks",
            "unit/common/quantization/test_groups",
            "unit/common/quantization/test_hub_formats",
            "unit/common/quantization/test_rounded",
            "unit/common/quantization/test_weight",
        ),
        # start processes in most of their tests (matplotlib does, to list the installed fonts)
        *(
            "unit/bench/commands/test_compare",
            "unit/bench/goals/test_goals",
            "unit/bench/peers/test_peers",
            "unit/bench/commands/test_plan",
        ),
        *(
            "unit/bench/commands/test_serve",
            "unit/deploy/cli/test_main",
            "unit/deploy/doctor/test_doctor",
            "unit/deploy/ranks/test_group",
            "unit/deploy/test_worker",
            "unit/coordinator/test_process",
            "unit/common/platform/test_malloc",
        ),
        *("unit/harness/test_leaked_keys", "unit/harness/test_nothing_left_behind", "unit/bench/load/test_plots"),
    )
)
"""Paths relative to ``tests``."""
NOT_FAST_MARKS = frozenset({"alone", "e2e", "processes", "slow", "torch"})
NOT_FAST_FIXTURES = frozenset({"checkpoint", "mock_url"})
"""The first needs torch, the second starts a process."""
TESTS = Path(__file__).parent


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="of each grid some combinations, not all")
    parser.addoption("--fast", action="store_true", help="only tests without torch and without processes")


def is_ignored(path: Path, config: pytest.Config) -> bool:
    """Return whether a file or folder is left out before it is imported."""
    if not config.getoption("--fast", False) or TESTS not in path.parents:
        return False
    inside = path.relative_to(TESTS)
    return inside.parts[0] not in FAST or inside.as_posix() in NOT_FAST_MODULES


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep in ``items`` the tests of this run, and report the others as deselected."""
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
    """Return items of ``grid`` that together contain every pair of values of two parameters. The result does not depend
    on the order of ``grid``."""
    grid = sorted(grid, key=lambda item: item.nodeid)
    values = defaultdict[str, dict[int, int]](dict)  # parameter -> id of a value -> index of that value
    combinations = [
        {name: values[name].setdefault(id(value), len(values[name])) for name, value in item.callspec.params.items()}
        for item in grid
    ]
    return [grid[index] for index in covering(combinations)]


def covering(combinations: Sequence[dict[str, int]]) -> list[int]:
    """Return indices of ``combinations`` (each: parameter -> index of its value) in which every pair of values
    occurs."""
    pairs = [set(itertools.combinations(sorted(each.items()), min(2, len(each)))) for each in combinations]
    order = list(range(len(combinations)))
    random.Random(SEED).shuffle(order)
    seen, chosen = set[Any](), list[int]()
    for fresh in range(max(map(len, pairs), default=0), 0, -1):  # take combinations with the most new pairs first
        for index in order:
            if len(pairs[index] - seen) >= fresh:
                chosen.append(index)
                seen |= pairs[index]
    return sorted(chosen)


def forbid_what_is_slow(config: pytest.Config) -> None:
    """Install the checks of ``--fast`` in processes that run tests, before any test module is imported."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.getoption("--fast", False) and runs_tests:
        forbid()


def forbid() -> None:
    """Make this interpreter refuse to import torch and to start processes. This cannot be undone."""
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
