"""Selection of tests: a sample covers every pair of values, and fast tests can neither import torch nor fork."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import selection

ROOT = Path(__file__).parents[3]


def grid(*sizes: int) -> list[dict[str, int]]:
    return [dict(zip("abcde", each, strict=False)) for each in itertools.product(*map(range, sizes))]


def pairs(combinations: list[dict[str, int]]) -> set[tuple[tuple[str, int], ...]]:
    return {pair for each in combinations for pair in itertools.combinations(sorted(each.items()), 2)}


def test_a_sample_has_every_pair_of_values_and_is_the_same_each_time() -> None:
    whole = grid(7, 3, 3, 3, 2)
    chosen = selection.covering(whole)
    assert pairs([whole[index] for index in chosen]) == pairs(whole)
    assert 7 * 3 <= len(chosen) <= 3 * 7 * 3 and chosen == selection.covering(whole)


def test_a_grid_with_holes_is_sampled_and_one_of_a_single_parameter_is_kept() -> None:
    holes = [each for each in grid(4, 4, 4) if each["a"] != each["b"]]
    assert pairs([holes[index] for index in selection.covering(holes)]) == pairs(holes)
    assert selection.covering(grid(5)) == [0, 1, 2, 3, 4]
    assert selection.covering([]) == []


INNER = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("c", [[1], [2], [3]], ids=str)
@pytest.mark.parametrize(("a", "b"), [(1, "x"), (2, "x"), (3, "y")])
@pytest.mark.parametrize("d", "pqr")
def test_sampled(a, b, c, d): ...

@pytest.mark.parametrize("c", range(5))
@pytest.mark.parametrize("d", "pqr")
def test_whole(c, d): ...

@pytest.mark.whole
def test_of_the_whole_run(): ...
"""
OUTER = """
from tests import selection
pytest_addoption = selection.add_options
def pytest_collection_modifyitems(config, items): selection.select(config, items)
"""


@pytest.mark.processes
def test_marked_grids_are_sampled_alike_in_every_order(tmp_path: Path) -> None:
    (tmp_path / "test_grid.py").write_text(INNER)
    (tmp_path / "conftest.py").write_text(OUTER)

    def collect(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, "--rootdir", tmp_path]
        command += ["-W", "ignore", tmp_path, *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
        assert ("test_of_the_whole_run" in done.stdout) == ("--sample" not in options)
        return set(re.findall(r"test_\w+\[.*\]", done.stdout))

    whole, once, again = collect(), *(collect("--sample", f"--randomly-seed={n}") for n in (1, 2))
    assert len(whole) == 27 + 15 and once == again
    assert {each for each in once if "whole" in each} == {each for each in whole if "whole" in each}
    sampled = [each for each in once if "sampled" in each]
    assert 9 <= len(sampled) < 18


@pytest.mark.processes
def test_fast_tests_collect_without_torch() -> None:
    """Each module is imported with the hook that forbids torch: a new one that needs torch must be in the list."""
    command = [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-q", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("import torch", "a fast test imports torch"),
        ("import transformers.utils", "a fast test imports transformers"),
        ("import subprocess; subprocess.run(['true'])", "a fast test starts a process"),
        ("import os; os.fork()", "a fast test starts a process"),
        ("import os; os.forkpty()", "a fast test starts a process"),
        ("import os; os.system('true')", "a fast test starts a process"),
        ("import os; os.popen('true')", "a fast test starts a process"),
        ("import os; os.spawnv(os.P_WAIT, '/bin/true', ['true'])", "a fast test starts a process"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "a fast test starts a process"),
        ("import os; os.posix_spawnp('true', ['true'], {})", "a fast test starts a process"),
        *(
            (f"import multiprocessing as m; m.get_context('{way}').{made}", "a fast test starts a process")
            for way in ("fork", "spawn", "forkserver")
            for made in ("Process(target=print).start()", "Manager()")
        ),
        ("from concurrent.futures import ProcessPoolExecutor as P; P(1).submit(print)", "a fast test starts a process"),
        (
            "from multiprocessing.resource_tracker import ensure_running; ensure_running()",
            "a fast test starts a process",
        ),
        ("from multiprocessing.util import spawnv_passfds as s; s(b'/bin/true', [b'a'], ())", "a fast test starts"),
    ],
)
def test_fast_mode_refuses_slow_operations(does: str, said: str) -> None:
    program = f"from tests import selection\nselection.forbid()\n{does}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1 and said in done.stderr
