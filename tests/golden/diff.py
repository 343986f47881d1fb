"""``python -m tests.golden.diff PART``: the first entry that is not as it was frozen, as it was and as it is.

What is kept of histories and transcripts is digests, so the code that made them plays the entry again, in a worktree of
its own with the compiled kernels of this one.

--key KEY...     look at these entries only (a seed, a request's name as in the file of the part)
--against REV    the code that plays it again; the commit that last changed the part's file if not given
--alone          do not play it again: show only where it differs, and what is there now
--before N       lines that are shown before the difference
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.golden.parts import PARTS, part
from tests.golden.store import Digest, Lines, difference

ROOT = Path(__file__).parents[2]


def main() -> int:
    options = _options()
    module = part(options.part)
    keys = options.key
    if options.print:
        for _, lines in module.record(keys):
            print(*lines, sep="\n")
        return 0
    kept, seen = module.kept(), set()
    if strange := [key for key in keys or () if key not in kept]:
        print(f"{options.part}: nothing is frozen as {strange[0]!r}; see {module.FILE.name}", file=sys.stderr)
        return 2
    for key, lines in module.record(keys):
        seen.add(key)
        if key not in kept:
            print(f"{options.part}: {key!r} is new")
            return 1
        if words := difference(kept[key], lines, options.before):
            print(f"{options.part}: the first entry that differs is {key!r}\n{words}")
            if isinstance(kept[key], Digest) and not options.alone:
                _show_both(options, kept[key], key, lines)
            return 1
    if gone := (kept.keys() & set(keys) if keys else kept.keys()) - seen:
        print(f"{options.part}: {min(gone)!r} is gone, and {len(gone) - 1} more")
        return 1
    print(f"{options.part}: nothing differs in {len(seen)} entries")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.diff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--key", nargs="+")
    parser.add_argument("--before", type=int, default=3)
    parser.add_argument("--against")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--print", action="store_true", help="only print the entry as it is now")
    return parser.parse_args()


def _show_both(options: argparse.Namespace, kept: Digest, key: str, now: Lines) -> None:
    """The lines of both sides around what differs."""
    revision = options.against or _frozen_by(part(options.part).FILE)
    if not revision:
        print("(what was there is not known: this is no git checkout)")
        return
    old = _played_by(revision, options.part, key)
    if old is None:
        print(f"(what was there is not known: the code of {revision} does not play this entry; try --against REV)")
        return
    if kept.departs(old) is not None:
        print(f"(the code of {revision} does not do what is frozen either; try --against REV)")
    print("\nboth sides:")
    print(*difflib.unified_diff(old, now, revision, "now", lineterm="", n=options.before), sep="\n")


def _frozen_by(file: Path) -> str:
    """The commit that last changed ``file``; "" if there is none."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", file], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return done.stdout.strip()


def _played_by(revision: str, name: str, key: str) -> Lines | None:
    """The lines of an entry by the code of ``revision``; None if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            for built in ROOT.glob("common/*/*.so"):
                if (place := tree / built.relative_to(ROOT)).parent.exists():
                    shutil.copy(built, place)
            command = [sys.executable, "-m", "tests.golden.diff", name, "--key", key, "--print"]
            environment = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True, text=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
