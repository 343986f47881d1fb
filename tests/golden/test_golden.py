"""Tests that the system behaves as it was frozen. README.md in this directory says what to do if a test fails.

Histories are compared where they are played: ``tests/simulation/test_simulation.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.golden import adapter, histories, refusals
from tests.golden.parts import PARTS, part
from tests.golden.store import ADVICE, Digest, difference, read_digests, read_whole, write_digests, write_whole


def changes(name: str, keys: Iterable[str] | None = None) -> str:
    """Describe the first difference of a part, and the number of differences; "" if there is none."""
    module = part(name)
    kept, now = module.kept(), dict(module.record(keys))
    wanted = kept.keys() if keys is None else set(keys)
    if now.keys() != wanted:
        gone, new = sorted(wanted - now.keys()), sorted(now.keys() - wanted)
        words = f"{len(gone)} are gone: {gone[:3]}; {len(new)} are new: {new[:3]}"
        return f"{words}\n{ADVICE.format(part=name, key=(gone or new)[0])}"
    changed = {key: words for key, lines in now.items() if (words := difference(kept[key], lines, 3))}
    for key, words in changed.items():
        return f"{len(changed)} of {len(now)} changed, first {key!r}: {words}\n{ADVICE.format(part=name, key=key)}"
    return ""


def tool(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.golden.diff WORDS``."""
    command = [sys.executable, "-m", "tests.golden.diff", *words]
    return subprocess.run(command, env=os.environ | variables, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["metrics", "commands", "wire", "tokens"])
def test_part(name: str) -> None:
    if words := changes(name):
        pytest.fail(words, pytrace=False)


@pytest.mark.slow
def test_transcripts() -> None:
    """Transcripts are unchanged, and together reach every place that refuses a request (recorded once for both)."""
    with adapter.watched_refusals() as reached:
        words = changes("transcripts")
    if found := [*([words] if words else []), *refusals.complaints(reached)]:
        pytest.fail("\n".join(found), pytrace=False)


def test_histories_do_not_depend_on_the_order_of_hashes() -> None:
    """``tests/simulation`` plays them with a different PYTHONHASHSEED."""
    done = tool("histories", "--alone", "--key", *map(str, range(20)), PYTHONHASHSEED="1")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_all_seeds_are_frozen() -> None:
    assert list(histories.kept()) == [str(seed) for seed in range(histories.SEEDS)]


# -- the net itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", adapter.CHANGES)
def test_a_changed_product_is_noticed(name: str) -> None:
    change = adapter.CHANGES[name]
    assert not changes(change.part, [change.key])
    with change.made():
        words = changes(change.part, [change.key])
    assert repr(change.key) in words and change.shown in words, words
    assert f"python -m tests.golden.diff {change.part}" in words


LINES = [f"event {number}" for number in range(100)]


@pytest.mark.parametrize("changed", [0, 1, 49, 98, 99])
def test_the_first_changed_line_is_found(changed: int) -> None:
    now = [*LINES[:changed], "another", *LINES[changed + 1 :]]
    assert Digest.of(LINES).departs(now) == range(changed, changed + 1)
    spaced = Digest.of(LINES, 16).departs(now)
    assert spaced is not None and changed in spaced and len(spaced) <= 16
    assert f"{changed + 1} another" in difference(Digest.of(LINES), now, 2)


def test_two_lines_in_the_other_order_are_found() -> None:
    now = [*LINES[:40], LINES[41], LINES[40], *LINES[42:]]
    assert Digest.of(LINES).departs(now) == range(40, 41)
    spaced = Digest.of(LINES, 16).departs(now)
    assert spaced is not None and 40 in spaced


def test_lines_that_are_missing_or_new_are_found() -> None:
    kept = Digest.of(LINES)
    assert kept.departs(LINES) is None and difference(kept, LINES, 3) == ""
    assert kept.departs(LINES[:-1]) == range(99, 99)
    assert "line 51 is another (100 lines then, 101 now)" in difference(kept, [*LINES[:50], "new", *LINES[50:]], 3)
    for other in ([*LINES, "more"], LINES[:-1]):
        assert f"the end is another (100 lines then, {len(other)} now)" in difference(kept, other, 3)


def test_store_reads_written_records(tmp_path: Path) -> None:
    file = tmp_path / "file"
    digests = {"a key of words": Digest.of(LINES), "b": Digest.of([]), "c": Digest.of(LINES, 16)}
    write_digests(file, digests.items())
    assert read_digests(file) == digests
    whole = {"a: key": ["x", "", "  y"], "b": []}
    write_whole(file, whole.items())
    assert read_whole(file) == whole


def test_diff_tool_names_unknown_key() -> None:
    done = tool("wire", "--key", "nothing")
    assert done.returncode == 2 and "nothing is frozen as 'nothing'; see wire.json" in done.stderr


def test_a_place_that_refuses_is_named_without_its_line() -> None:
    names = [place.name for place in refusals.places()]
    assert len(names) == len(set(names))
    assert (
        "CrashVerdicts.worker_died: quarantined()" in names
        and "quarantined: RequestError(500, server_error, request_quarantined)" in names
    )
    assert any(
        "no transcript reaches CrashVerdicts.worker_died: quarantined()" in each for each in refusals.complaints(set())
    )


def test_only_adapter_and_troubles_import_product() -> None:
    """A renamed module must require changes in these two files only."""
    own = Path(__file__).parent
    rooms = ("common", "coordinator", "prefill", "decode", "kvtransfer", "deploy", "bench")
    imports = re.compile(rf"\s*(from|import) ({'|'.join(rooms)})\b")
    for file in own.glob("*.py"):
        found = [line for line in file.read_text().splitlines() if imports.match(line)]
        assert bool(found) == (file.name in ("adapter.py", "troubles.py")), (file.name, found)
    assert {f"{name}.py" for name in PARTS} <= {file.name for file in own.glob("*.py")}
