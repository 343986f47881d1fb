"""``python -m tests.golden.diff PART``: show the first entry that differs from its frozen state, before and now.

Histories and transcripts are stored as digests, so the old lines are recorded again with the code that froze them, in a
git worktree with the compiled kernels of this one.

--key KEY...     compare only these entries (a seed, or a request's name as in the part's file)
--against REV    the commit whose code records the old lines; default: the last that changed the part's file
--alone          do not record the old lines; show only where the entry differs, and the new lines
--before N       number of lines to show before the difference
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
    """Print the old and the new lines around the difference."""
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
    """Return the commit that last changed ``file``; "" if there is none."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", file], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return done.stdout.strip()


def _played_by(revision: str, name: str, key: str) -> Lines | None:
    """Return the lines of an entry as recorded by the code of ``revision``; None if that fails."""
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
