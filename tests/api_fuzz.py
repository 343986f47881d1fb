"""``python -m tests.api_fuzz SCHEMATHESIS [OPTIONS]``: random requests by /openapi.json against ``tandem up``.

Fails for a status of 500 or more, for an answer whose status, media type or schema the description does not have, and
for a malformed request that is accepted. Not checked is whether every request that fits the description is accepted.
About nine of ten are; the description cannot express for the others that prompt and output fit the context together,
that token ids are in the vocabulary, what a chat template refuses, and how fields depend on each other
(``stream_options`` on ``stream``, ``top_logprobs`` on ``logprobs``, ``min_tokens`` on ``max_tokens``, a choice of tools
on ``tools``). POST /admin/scale is left out, because a random request could start any number of workers, and GET
/admin/events, whose answer does not end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import builtin
from tests.e2e.system import RunningSystem

EXAMPLES, SEED, CONTEXT = 200, 1, 256


def main(program: str, *more: str) -> int:
    with tempfile.TemporaryDirectory() as directory:
        flags = ("--max-model-len", str(CONTEXT))
        with RunningSystem.up(Path(directory), builtin.path(), *flags, small=()) as system:
            words = [program, "run", f"{system.url}/openapi.json", "--url", system.url, "--phases", "fuzzing"]
            words += ["--max-examples", str(EXAMPLES), "--seed", str(SEED), "--request-timeout", "30"]
            words += ["--exclude-path", "/admin/scale", "--exclude-path", "/admin/events"]
            words += ["--exclude-checks", "positive_data_acceptance"]
            return subprocess.run([*words, "--continue-on-failure", "--no-color", *more], cwd=directory).returncode


if __name__ == "__main__":
    sys.exit(main(str(Path(sys.argv[1]).resolve()), *sys.argv[2:]))
