"""``python -m bench.crosscheck``: do other tools measure what ``tandem bench serve`` measures?

Each tool puts the same load on a server of its own that answers on a scripted clock (:mod:`bench.mock`), and what it
reports is compared with when the chunks were really written. The tools mean different things by their names:

    | here | tandem and vllm bench serve | GuideLLM |
    |---|---|---|
    | TTFT | mean_ttft_ms | time_to_first_token_ms |
    | TPOT | mean_tpot_ms | inter_token_latency_ms: (last token - first token) / (n - 1) |
    | E2EL | mean_e2el_ms | time_per_output_token_ms times output_tokens: from the request to the last token |
"""

from __future__ import annotations

import argparse
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

from bench import results
from bench.mock import MODEL

TOKENIZER = results.ROOT / "common" / "builtin" / "model"
REQUESTS, RATE, INPUT, OUTPUT = 30, 2.0, 64, 24
WITHIN = 0.01
METRICS = ("ttft", "tpot", "e2el")
Figures = dict[str, float]
"""Mean of each of ``METRICS``, in ms."""


@dataclass(frozen=True)
class Tool:
    """A load generator: its words for a server at a URL that save their figures in a file, and how these are read."""

    words: Callable[[str, Path], list[str]]
    read: Callable[[Any], Figures]
    version: list[str]


def tandem() -> Tool:
    command = [sys.executable, "-m", "deploy.cli"]

    def words(url: str, saved: Path) -> list[str]:
        load = f"--num-prompts {REQUESTS} --request-rate {RATE} --burstiness inf --num-warmups 0"
        lengths = f"--random-input-len {INPUT} --random-output-len {OUTPUT}"
        return [*command, "bench", "serve", "--url", url, *load.split(), *lengths.split(), "--save", str(saved)]

    return Tool(words, _means, [*command, "--version"])


def vllm(program: str) -> Tool:
    def words(url: str, saved: Path) -> list[str]:
        load = f"--num-prompts {REQUESTS} --request-rate {RATE} --burstiness inf --ignore-eos --disable-tqdm"
        lengths = f"--dataset-name random --random-input-len {INPUT} --random-output-len {OUTPUT}"
        where = f"--backend openai --base-url {url} --model {MODEL} --tokenizer {TOKENIZER}"
        to = ["--save-result", "--result-dir", str(saved.parent), "--result-filename", saved.name]
        metrics = "--percentile-metrics ttft,tpot,itl,e2el"
        return [program, "bench", "serve", *f"{where} {load} {lengths} {metrics}".split(), *to]

    return Tool(words, _means, [program, "--version"])


def guidellm(program: str) -> Tool:
    def words(url: str, saved: Path) -> list[str]:
        return [
            program, "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions",
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


def check(tool: Tool) -> dict[str, Any]:
    """What a tool reports, what was done, and by which share they differ."""
    with mock() as url, tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "figures.json"
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        done = subprocess.run(tool.words(url, saved), env=os.environ | quiet, capture_output=True, text=True)
        if done.returncode or not saved.exists():
            raise SystemExit(f"{tool.version[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        reported = tool.read(json.loads(saved.read_text(encoding="utf-8")))
        with urllib.request.urlopen(f"{url}/truth") as response:  # noqa: S310 - a server of our own
            truth = _written(json.load(response))
    version = subprocess.run(tool.version, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    differences = {metric: reported[metric] / truth[metric] - 1 for metric in METRICS}
    return {"version": version, "reported_ms": reported, "written_ms": truth, "difference": differences}


@contextlib.contextmanager
def mock() -> Iterator[str]:
    """The URL of a server with a scripted clock in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "bench.mock"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def _written(moments: list[list[float]]) -> Figures:
    if len(moments) != REQUESTS:
        raise SystemExit(f"{len(moments)} requests were answered instead of {REQUESTS}")
    return {
        "ttft": 1000 * statistics.fmean(each[0] for each in moments),
        "tpot": 1000 * statistics.fmean((each[-1] - each[0]) / (len(each) - 1) for each in moments),
        "e2el": 1000 * statistics.fmean(each[-1] for each in moments),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.crosscheck", description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", help="program of an installed vLLM")
    parser.add_argument("--guidellm", help="program of an installed GuideLLM")
    parser.add_argument("--save", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    tools = {"tandem bench serve": tandem()}
    if options.vllm:
        tools["vllm bench serve"] = vllm(options.vllm)
    if options.guidellm:
        tools["guidellm"] = guidellm(options.guidellm)
    found = {name: check(tool) for name, tool in tools.items()}
    print("| tool | version | TTFT | TPOT | E2EL |\n|---|---|---|---|---|")
    for name, figures in found.items():
        shown = " | ".join(
            f"{figures['reported_ms'][metric]:.2f} ms ({figures['difference'][metric]:+.2%})" for metric in METRICS
        )
        print(f"| {name} | {figures['version']} | {shown} |")
    worst = max(abs(each) for figures in found.values() for each in figures["difference"].values())
    print(f"largest difference from what was written: {worst:.2%} (allowed: {WITHIN:.0%})")
    if options.save:
        load = {"requests": REQUESTS, "rate": RATE, "input_tokens": INPUT, "output_tokens": OUTPUT}
        results.save(options.save, {"load": load, "allowed": WITHIN, "largest": worst, "tools": found})
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
