"""Run the checks of all clients on every route and write ``docs/reference/clients.md``.

    python -m tests.conformance CLIENTS NPM [FILE ...] [--only ROUTE]

CLIENTS is the environment with the Python clients, beside which CLIENTS-pydantic-ai has one that needs other versions;
NPM is the folder with those for JavaScript. With files (``check_llm.py``) or routes only these run, and nothing is
written. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import builtin
from tests.conformance import proxies, report
from tests.conformance.recorder import recording
from tests.e2e.system import RunningSystem

FOLDER = Path(__file__).parent / "clients"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
FLAGS = (
    *("--port", "0", "--control-port", "0", "--served-model-name", "tandem-builtin"),
    *("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "1024"),
)
APART = {"check_pydantic_ai.py": "pydantic-ai"}
"""Files that run in an environment of their own, with the end of its name."""
ROUTES = ("direct", "nginx", "HAProxy")
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "NEXT_TELEMETRY_DISABLED": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment of the clients: no telemetry and no lists from the network."""


async def run_checks(
    name: str, url: str, files: list[Path], clients: Path, npm: Path, folder: Path
) -> list[dict[str, Any]]:
    """Run each file of checks against ``url`` in a process of its own; return one result per check."""
    results = folder / "results.jsonl"
    async with recording(url) as recorder:
        for file in files:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET
            environment |= {
                "CONFORMANCE_URL": recorder,
                "CONFORMANCE_RESULTS": str(results),
                "CONFORMANCE_NPM": str(npm),
            }
            python = (clients if file.name not in APART else Path(f"{clients}-{APART[file.name]}")) / "bin" / "python"
            command = [str(python), "-m", "pytest", "-q", "--tb=short", "-W", "ignore", file.name]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, cwd=FOLDER, env=environment, stdout=pipe)
            said, _ = await process.communicate()
            print(f"-- {name}: {file.name}\n{said.decode()}", flush=True)
            assert process.returncode in (0, 1), f"{file.name}: pytest ended with {process.returncode}"
    return [json.loads(line) for line in results.read_text().splitlines()]


async def run_route(
    name: str, url: str, arguments: argparse.Namespace, files: list[Path]
) -> list[dict[str, Any]] | str:
    """Return the results behind one proxy, or why there are none."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name != "direct":
            if proxies.version(name) is None:
                return "it is not installed"
            url = stack.enter_context(proxies.before(url, name, folder))
        return await run_checks(name, url, files, arguments.clients, arguments.npm, folder)


async def run_routes(url: str, arguments: argparse.Namespace, files: list[Path]) -> dict[str, Any]:
    """Run all routes side by side; return the results of each."""
    names = arguments.only or ROUTES
    found = await asyncio.gather(*(run_route(name, url, arguments, files) for name in names))
    return dict(zip(names, found, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("clients", type=Path)
    parser.add_argument("npm", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--only", choices=ROUTES, action="append", help="run on this route only")
    arguments = parser.parse_args()
    arguments.clients, arguments.npm = arguments.clients.absolute(), arguments.npm.absolute()
    files = [FOLDER / name for name in arguments.files] or sorted(FOLDER.glob("check_*.py"))
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "up.log"
        system = stack.enter_context(RunningSystem.running(log, "up", builtin.path(), *FLAGS))
        routes = asyncio.run(run_routes(system.url, arguments, files))
    failed = 0
    for name, results in routes.items():
        print(f"{name}: {results if isinstance(results, str) else report.counts(results)}")
        failed += 0 if isinstance(results, str) else report.counts(results)["failed"]
    if not (arguments.files or arguments.only):
        versions = {name: proxies.version(name) or "" for name in proxies.COMMANDS}
        PAGE.write_text(report.page(routes, versions))
        print(f"wrote {PAGE}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
