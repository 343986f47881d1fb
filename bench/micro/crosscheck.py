"""``tandem bench crosscheck``: do other load generators report what ``tandem bench serve`` reports?

Each tool puts the same load on a server of its own that answers on a schedule (:mod:`bench.load.mock_server`). Its
report is compared with the times at which the server wrote the chunks. The tools have different names for the same
times:

    | here | tandem and vllm bench serve | GuideLLM |
    |---|---|---|
    | TTFT | mean_ttft_ms | time_to_first_token_ms |
    | TPOT | mean_tpot_ms | inter_token_latency_ms: (last token - first token) / (n - 1) |
    | E2EL | mean_e2el_ms | time_per_output_token_ms times output_tokens: from the request to the last token |

Loads are completions, chats, and chats that begin with a chunk which only has a role. vLLM's client counts that chunk
as the first token, which it is not, so it is left out of the last load.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import results
from bench.load.mock_server import MODEL
from common.config.bench.crosscheck import BenchCrosscheckConfig
from common.core.errors import StartError

TOKENIZER = results.ROOT / "common" / "builtin" / "model"
REQUESTS, RATE, INPUT, OUTPUT = 30, 2.0, 64, 24
WITHIN = 0.01
METRICS = ("ttft", "tpot", "e2el")
Figures = dict[str, float]
"""Mean of each of ``METRICS``, in ms."""


@dataclass(frozen=True)
class Load:
    """An endpoint; ``role_first``: its answers begin with a chunk that only has a role."""

    chat: bool = False
    role_first: bool = False

    def __str__(self) -> str:
        return "chat, role first" if self.role_first else "chat" if self.chat else "completions"


LOADS = (Load(), Load(chat=True), Load(chat=True, role_first=True))


@dataclass(frozen=True)
class Tool:
    """A load generator: its command line for a server at a URL that saves its figures in a file, and the function that
    reads them."""

    words: Callable[[str, Path, Load], list[str]]
    read: Callable[[Any], Figures]
    version: list[str]
    role_is_token: bool = False
    """Whether it counts a chunk that only has a role as the first token."""


def tandem() -> Tool:
    """Return ``tandem bench serve`` of the running Python environment."""
    command = [sys.executable, "-m", "deploy.cli"]

    def words(url: str, saved: Path, asked: Load) -> list[str]:
        load = f"--num-prompts {REQUESTS} --request-rate {RATE} --burstiness inf --num-warmups 0"
        load += f" --backend {'openai-chat' if asked.chat else 'openai'}"
        lengths = f"--random-input-len {INPUT} --random-output-len {OUTPUT}"
        return [*command, "bench", "serve", "--url", url, *load.split(), *lengths.split(), "--save", str(saved)]

    return Tool(words, _means, [*command, "--version"])


def vllm(program: str) -> Tool:
    """Return ``vllm bench serve``; ``program`` is the path of the ``vllm`` command."""

    def words(url: str, saved: Path, asked: Load) -> list[str]:
        load = f"--num-prompts {REQUESTS} --request-rate {RATE} --burstiness inf --ignore-eos --disable-tqdm"
        backend = "openai-chat --endpoint /v1/chat/completions" if asked.chat else "openai"
        lengths = f"--dataset-name random --random-input-len {INPUT} --random-output-len {OUTPUT}"
        where = f"--backend {backend} --base-url {url} --model {MODEL} --tokenizer {TOKENIZER}"
        to = ["--save-result", "--result-dir", str(saved.parent), "--result-filename", saved.name]
        metrics = "--percentile-metrics ttft,tpot,itl,e2el"
        return [program, "bench", "serve", *f"{where} {load} {lengths} {metrics}".split(), *to]

    return Tool(words, _means, [program, "--version"], role_is_token=True)


def guidellm(program: str) -> Tool:
    """Return GuideLLM; ``program`` is the path of the ``guidellm`` command."""

    def words(url: str, saved: Path, asked: Load) -> list[str]:
        path = "/v1/chat/completions" if asked.chat else "/v1/completions"
        return [
            program, "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model={MODEL},request_format={path}",
            "--profile", f"kind=constant,rate={RATE}",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
            "--output", f"kind=json,path={saved}",
        ]  # fmt: skip

    def read(saved: Any) -> Figures:
        requests = saved["benchmarks"][0]["requests"]["successful"]
        return {
            "ttft": statistics.fmean(each["time_to_first_token_ms"] for each in requests),
            "tpot": statistics.fmean(each["inter_token_latency_ms"] for each in requests),
            "e2el": statistics.fmean(each["time_per_output_token_ms"] * each["output_tokens"] for each in requests),
        }

    return Tool(words, read, [program, "--version"])


def _means(saved: Any) -> Figures:
    return {metric: float(saved[f"mean_{metric}_ms"]) for metric in METRICS}


def check(tool: Tool, load: Load) -> dict[str, Any]:
    """Return what a tool reports, what the server wrote, and their relative difference."""
    with mock(load) as url, tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "figures.json"
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        done = subprocess.run(tool.words(url, saved, load), env=os.environ | quiet, capture_output=True, text=True)
        if done.returncode or not saved.exists():
            said = (done.stdout + done.stderr)[-3000:]
            raise StartError(f"{' '.join(tool.version[:-1])} failed", said, "run it alone against a server")
        reported = tool.read(json.loads(saved.read_text(encoding="utf-8")))
        with urllib.request.urlopen(f"{url}/truth") as response:  # noqa: S310 - a server of our own
            truth = _written(json.load(response))
    version = subprocess.run(tool.version, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    differences = {metric: reported[metric] / truth[metric] - 1 for metric in METRICS}
    return {"version": version, "reported_ms": reported, "written_ms": truth, "difference": differences}


@contextlib.contextmanager
def mock(load: Load) -> Iterator[str]:
    """Run a mock server in a process of its own and yield its URL."""
    words = [sys.executable, "-m", "deploy.cli", "bench", "mock-server", "--port", "0"]
    words += ["--role-first"] if load.role_first else []
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def _written(moments: list[list[float]]) -> Figures:
    if len(moments) != REQUESTS:
        raise StartError("a load was not complete", f"{len(moments)} requests were answered instead of {REQUESTS}", "")
    return {
        "ttft": 1000 * statistics.fmean(each[0] for each in moments),
        "tpot": 1000 * statistics.fmean((each[-1] - each[0]) / (len(each) - 1) for each in moments),
        "e2el": 1000 * statistics.fmean(each[-1] for each in moments),
    }


def run(config: BenchCrosscheckConfig) -> int:
    """Print what each tool reports of each load; exit code 1 if a figure is off by more than ``WITHIN``."""
    tools = {"tandem bench serve": tandem()}
    if config.vllm:
        tools["vllm bench serve"] = vllm(config.vllm)
    if config.guidellm:
        tools["guidellm"] = guidellm(config.guidellm)
    found: dict[str, dict[str, Any]] = {str(load): {} for load in LOADS}
    print("| load | tool | version | TTFT | TPOT | E2EL |\n|---|---|---|---|---|---|")
    for load in LOADS:
        for name, tool in tools.items():
            if load.role_first and tool.role_is_token:
                continue
            figures = found[str(load)][name] = check(tool, load)
            shown = " | ".join(
                f"{figures['reported_ms'][metric]:.2f} ms ({figures['difference'][metric]:+.2%})" for metric in METRICS
            )
            print(f"| {load} | {name} | {figures['version']} | {shown} |", flush=True)
    every = [figures for by_tool in found.values() for figures in by_tool.values()]
    worst = max(abs(each) for figures in every for each in figures["difference"].values())
    print(f"largest difference from what was written: {worst:.2%} (allowed: {WITHIN:.0%})")
    if config.save:
        lengths = {"requests": REQUESTS, "rate": RATE, "input_tokens": INPUT, "output_tokens": OUTPUT}
        results.save(Path(config.save), {"load": lengths, "allowed": WITHIN, "largest": worst, "loads": found})
    return 0 if worst <= WITHIN else 1
