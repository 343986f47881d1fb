"""``python -m tests.golden.freeze [PART...]``: freeze the current behaviour; all parts if none is named."""

from __future__ import annotations

import sys
import time

from tests.golden.parts import PARTS, part


def main(names: list[str]) -> int:
    if strange := set(names) - set(PARTS):
        print(f"no part {', '.join(sorted(strange))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for name in names or PARTS:
        began = time.monotonic()
        module = part(name)
        words = module.freeze()
        print(f"{name}: {words}; {module.FILE.stat().st_size:,} bytes, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
