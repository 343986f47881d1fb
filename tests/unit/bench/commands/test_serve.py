"""``tandem bench serve`` against a server on a scripted clock: the report equals what the server did."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import statistics
import subprocess
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from bench.commands.serve import show_remarks
from bench.load import results
from bench.load.client import Record, Target
from bench.load.mock_server import MockServer, Script
from bench.load.results import provenance
from bench.load.run import run_load
from bench.load.setup import prepare
from bench.load.workloads import PlannedRequest
from common.config.bench.serve import BenchServeConfig
from common.core.errors import StartError
from deploy.cli import main as cli
from tests.leaked_keys import new_key
from tests.unit.deploy.cli.test_main import assert_refused, tandem


class ScriptedClock:
    """A clock that advances only when the server waits and the client has looked at everything sent before. The client
    looks at its own start, at each of ``preamble`` chunks without text, and at one chunk per wait of the server."""

    def __init__(self, preamble: int) -> None:
        self.now = 0.0
        self._looks, self._wanted = 0, preamble
        self._looked = asyncio.Event()

    def client(self) -> float:
        self._looks += 1
        self._looked.set()
        return self.now

    def server(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self._wanted += 1
        while self._looks < self._wanted:
            self._looked.clear()
            await self._looked.wait()
        self.now += seconds


@pytest.mark.parametrize(("backend", "role_first"), [("openai", False), ("openai-chat", False), ("openai-chat", True)])
async def test_the_client_measures_the_script_exactly(backend: Any, role_first: bool) -> None:
    """Also if a chunk with a role comes long before the first token."""
    clock = ScriptedClock(preamble=int(role_first))
    script = Script(ttft_s=0.321, gap_s=0.0125)
    mock = MockServer([script], clock=clock.server, sleep=clock.sleep, role_first=role_first)
    async with TestServer(mock.app()) as server:
        target = Target(str(server.make_url("")).rstrip("/"), "scripted", backend)
        async with target.session() as session:
            record = Record(0.0, 0)
            ask = PlannedRequest([65, 66] if backend == "openai" else "AB", 2, 9)
            await target.send(session, target.body(ask), record, clock.client)
    assert record.ok, record.error
    assert record.ttft == pytest.approx(0.321)
    assert record.tpot == pytest.approx(0.0125)
    assert record.itls == pytest.approx([0.0125] * 8)
    assert record.latency == pytest.approx(0.321 + 8 * 0.0125)
    assert record.output_tokens == 9
    assert mock.bodies[0]["stream_options"] == {"include_usage": True}


async def test_requests_leave_on_time_whatever_became_of_the_others() -> None:
    """Open loop: all requests are sent before any is answered. With max_concurrency 1, each waits for the one
    before."""
    mock = MockServer([Script(0.15, 0.0)])
    async with TestServer(mock.app()) as server:
        target = Target(str(server.make_url("")).rstrip("/"), "scripted")
        asks = [PlannedRequest([65], 1, 1)] * 5
        times = [0.0, 0.01, 0.02, 0.03, 0.04]
        open_loop = await run_load(target, asks, times)
        half_open = await run_load(target, asks, times, max_concurrency=1)
    firsts = [record.moments[0] for record in open_loop.records]
    assert max(record.sent_at for record in open_loop.records) < min(firsts)
    ends = [record.moments[-1] for record in half_open.records]
    assert all(record.sent_at >= end for record, end in zip(half_open.records[1:], ends, strict=False))
    assert half_open.records[-1].waited >= 0.15 * 4 - 0.04


async def test_failures_are_recorded_and_end_nothing() -> None:
    mock = MockServer([Script(0.0, 0.0)], refuse_every=3)
    async with TestServer(mock.app()) as server:
        target = Target(str(server.make_url("")).rstrip("/"), "scripted")
        run = await run_load(target, [PlannedRequest([65], 1, 2)] * 7, [0.0] * 7)
    assert [record.error for record in run.records].count("HTTP 503: too much") == 2
    assert sum(record.ok for record in run.records) == 5
    gone = await run_load(target, [PlannedRequest([65], 1, 2)] * 2, [0.0] * 2)
    assert all("Cannot connect" in record.error for record in gone.records)
    with pytest.raises(StartError, match="Cannot connect"):
        await run_load(target, [], [], warm=[PlannedRequest([65], 1, 2)])


@pytest.mark.parametrize(("cached", "reported"), [(None, ""), (0, ""), (3, "75% of prompt tokens")])
async def test_report_mentions_cached_prompt_tokens(cached: int | None, reported: str) -> None:
    """Cache hits are invisible from outside, so the report says that the figures include them."""
    mock = MockServer([Script(0.0, 0.0)], cached_tokens=cached)
    async with TestServer(mock.app()) as server:
        target = Target(str(server.make_url("")).rstrip("/"), "scripted")
        run = await run_load(target, [PlannedRequest([65] * 4, 4, 2)] * 2, [0.0] * 2)
    assert [record.cached_tokens for record in run.records] == [cached or 0] * 2
    show_remarks(Console(file=(shown := io.StringIO())), run.records)
    assert (reported in shown.getvalue()) if reported else not shown.getvalue()


@pytest.mark.parametrize(("below", "named"), [("", "/"), ("", "/v1"), ("/some/where", ""), ("/some/where", "/v1/")])
async def test_a_url_may_have_a_path_and_its_v1(below: str, named: str) -> None:
    """Gateways serve models below their own paths, and many clients take a URL that ends in /v1."""
    mock, app = MockServer([Script(0.0, 0.0)]), web.Application()
    if below:
        app.add_subapp(below, mock.app())
    async with TestServer(app if below else mock.app()) as server:
        url = str(server.make_url("")).rstrip("/") + below
        config = BenchServeConfig(url=url + named, num_prompts=2, random_input_len=5, random_output_len=3)
        prepared = await asyncio.to_thread(prepare, config, config.url)
        run = await run_load(prepared.target, prepared.asks(), [0.0] * 2)
    assert prepared.target.url == url
    assert [(each.prompt_tokens, each.output_tokens) for each in run.records] == [(5, 3)] * 2


async def test_an_answer_that_takes_too_long_is_a_failure() -> None:
    mock = MockServer([Script(30.0, 0.0)])
    async with TestServer(mock.app()) as server:
        target = Target(str(server.make_url("")).rstrip("/"), "scripted", timeout_s=0.1)
        run = await run_load(target, [PlannedRequest([65], 1, 2)], [0.0])
    assert run.records[0].error == "no answer within 0.1 s"


# -- the command ------------------------------------------------------------------------------------------------------


def truth(url: str) -> list[list[float]]:
    with urllib.request.urlopen(f"{url}/truth") as response:
        found: list[list[float]] = json.load(response)
        return found


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_command_figures_match_server_log(
    backend: str,
    mock_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figures of the whole command are compared with the server's actual write times, not with the script's."""
    words = (
        f"bench serve --url {mock_url}/v1 --backend {backend} --num-prompts 10 --request-rate 10 --num-warmups 0"
        f" --random-input-len 20 --random-output-len 8 --goodput ttft:100000 --metric-percentiles 50,90 --save-detailed"
    )
    saved, drawn = tmp_path / "run.json", tmp_path / "run.png"
    monkeypatch.setattr("sys.argv", ["tandem", *words.split()])
    assert cli.main([*words.split(), "--save", str(saved), "--plot", str(drawn)]) == 0
    shown = capsys.readouterr().out
    figures = json.loads(saved.read_text())
    done = truth(mock_url)
    assert len(done) == 10
    for name, seconds in (
        ("ttft", [each[0] for each in done]),
        ("tpot", [(each[-1] - each[0]) / 7 for each in done]),
        ("e2el", [each[-1] for each in done]),
    ):
        assert figures[f"mean_{name}_ms"] == pytest.approx(1000 * statistics.mean(seconds), rel=0.2)
    assert "Successful requests:                     10" in shown and "P90 E2EL (ms):" in shown
    assert figures["completed"] == 10 and figures["slo_attainment"] == 1 and figures["request_rate"] == 10
    assert figures["total_output_tokens"] == 80 and figures["output_lens"] == [8] * 10
    assert figures["commit"] is None or len(figures["commit"]) >= 7
    assert figures["load"]["random_output_len"] == 8 and figures["load"]["ignore_eos"] is True
    assert figures["machine"]["cores"] >= 1 and figures["command"] == f"tandem {words}"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_serve_accepts_request_flags_of_vllm(mock_url: str, tmp_path: Path) -> None:
    """Objectives, headers and metadata may be several words, ``--extra-body`` overrides the sampling flags, and
    metadata does not overwrite other saved fields."""
    saved = tmp_path / "run.json"
    words = (
        "--num-prompts 1 --num-warmups 0 --random-output-len 2 --goodput ttft:100000 tpot:100000 --label one".split()
    )
    words += ["--header", "x-team=a, b", "x-tenant=c=d", "--metadata", "version=7", "completed=never"]
    words += ["--temperature", "0", "--top-p", "0.5", "--top-k", "4", "--extra-body", '{"top_k": 5, "seed": 1}']
    assert cli.main(["bench", "serve", "--base-url", mock_url, *words, "--save", str(saved)]) == 0
    with urllib.request.urlopen(f"{mock_url}/asked") as response:
        ((headers, body),) = json.load(response)
    assert (headers["x-team"], headers["x-tenant"]) == ("a, b", "c=d")
    assert {name: body.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")} == {
        "temperature": 0, "top_p": 0.5, "top_k": 5, "min_p": None, "seed": 1
    }  # fmt: skip
    figures = json.loads(saved.read_text())
    assert (figures["label"], figures["version"], figures["completed"]) == ("one", "7", 1)
    assert figures["goodput"] == "ttft:100000,tpot:100000" and figures["slo_attainment"] == 1


RAMP = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "104")


def test_serve_saves_ramp_in_format_of_vllm(mock_url: str, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    words = ("--url", mock_url, "--num-prompts", "3", "--num-warmups", "0", "--random-output-len", "1", *RAMP)
    assert cli.main(["bench", "serve", *words, "--save", str(saved)]) == 0
    figures = json.loads(saved.read_text())
    assert figures["request_rate"] == "inf" and figures["ramp_up_strategy"] == "linear"
    assert (figures["ramp_up_start_rps"], figures["ramp_up_end_rps"]) == (100, 104)
    events = figures["rps_change_events"]
    assert [event["rps"] for event in events] == [100, 101, 102, 103, 104]
    when = [datetime.fromisoformat(event["timestamp"]) for event in events]
    assert when == sorted(when) and abs((datetime.now() - when[-1]).total_seconds()) < 60


def test_the_command_is_kept_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three, four, five, six, seven = (new_key() for _ in range(7))
    words = ["bench", "compare", "/some/model", "--api-key", one, "--url", f"http://{two}:{three}@host:80/v1"]
    flags = ["--up-flags", f"--api-key 'f {four}' --admin-api-key={five}", f"--up-flags=--api-key {six}"]
    flags.append(f"--api-key={seven}")
    monkeypatch.setattr("sys.argv", ["/usr/bin/tandem", *words, *flags])
    assert provenance()["command"] == (
        "tandem bench compare model --api-key ... --url http://host:80/v1"
        " --up-flags '--api-key ... --admin-api-key=...' '--up-flags=--api-key ...' --api-key=..."
    )
    words = ["bench", "serve", "--api_key", one, "--header", f"a={two}", f"b={three}", "--num-prompts", "4"]
    words.append(f"--header=c={four}")
    monkeypatch.setattr("sys.argv", ["/usr/bin/tandem", *words])
    assert provenance()["command"] == ("tandem bench serve --api_key ... --header ... ... --num-prompts 4 --header=...")
    monkeypatch.setattr("sys.argv", ["/usr/bin/tandem", "bench", "compare", "--api-key", one, "model"])
    assert provenance()["command"] == "tandem bench compare --api-key ... model"


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


def commit_all(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")


def test_the_commit_is_marked_where_files_differ_other_than_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_commit", results._commit.__wrapped__)  # as in a new process each time
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert provenance()["commit"] is None
    (tmp_path / "bench" / "results").mkdir(parents=True)
    code, figures = tmp_path / "code.py", tmp_path / "bench" / "results" / "goals.json"
    for path in (code, figures):
        path.write_text("1")
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    figures.write_text("2")
    (tmp_path / "new").touch()
    clean = provenance()["commit"]
    assert len(clean) == 12 and f"commit {clean}" in results.provenance_line()
    code.write_text("2")
    assert provenance()["commit"] == f"{clean}+"


def test_provenance_names_commit_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "_commit", functools.cache(results._commit.__wrapped__))
    (code := tmp_path / "code.py").write_text("1")
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    results.check_outputs(None, None)
    code.write_text("2")
    commit_all(tmp_path)
    began = provenance()["commit"]
    assert began == results._git("rev-parse", "--short=12", "HEAD~1")


def test_figures_of_other_sources_or_machines_are_not_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_commit", results._commit.__wrapped__)  # as in a new process each time
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert not results.comparable(provenance()), "their sources are unknown"
    code, *others = (tmp_path / name for name in ("code.py", "README.md", "tests/test.py", "bench/results/goals.json"))
    for path in (code, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    earlier = provenance()
    assert results.comparable(earlier)
    ranked = {"real_time_threads": not earlier["machine"]["real_time_threads"]}
    for other in ({"cores": 1000}, ranked, {"cpu_model": "cpu family 1, model 2"}, {"instructions": []}):
        assert not results.comparable(earlier | {"machine": earlier["machine"] | other})
    assert not results.comparable(earlier | {"commit": "0123456789ab"})
    for path in others:
        path.write_text("2")
    commit_all(tmp_path)
    assert results.comparable(earlier), "documents, tests and figures are no sources"
    code.write_text("2")
    assert not results.comparable(earlier), "not committed"
    commit_all(tmp_path)
    assert not results.comparable(earlier)
    assert results.comparable(provenance())


def test_a_run_in_which_nothing_succeeds_exits_with_1(mock_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"bench serve --url {mock_url} --num-prompts 2 --num-warmups 0 --answer-timeout 0.001"
    assert cli.main(words.split()) == 1
    reported = capsys.readouterr()
    assert "failed: 2 x no answer within 0.001 s" in reported.err
    assert "Successful requests:                     0" in reported.out and "TTFT" not in reported.out, (
        "nothing was timed"
    )


def test_serve_refuses_invalid_options(mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "trace.csv"
    odd.write_text("a,b\n1,2\n")
    at_mock = ("--url", mock_url)
    for words, said in (
        (("--url", "http://127.0.0.1:9"), "tandem up"),
        ((*at_mock, "--model", "other"), "scripted"),
        (("--dataset-name", "azure"), "--dataset-path"),
        (("--goodput", "ttfb:3"), "ttft:1000"),
        (("--goodput", "ttft:3x"), "in ms"),
        (("--ramp-up-strategy", "linear"), "ramp"),
        ((*RAMP, "--request-rate", "2"), "the ramp says the rate"),
        ((*at_mock, "--time-scale", "2", "--num-prompts", "1"), "would have no effect"),
        ((*at_mock, "--burstiness", "2", "--num-prompts", "1"), "give --request-rate"),
        (("--request-rate", "0"), "greater than 0"),
        (("--request-rate", "nan"), "greater than 0"),
        (("--metric-percentiles", "50,101"), "0 to 100"),
        (("--header", "one"), "NAME=VALUE"),
        (("--percentile-metrics", "ttft,tttt"), "tttt"),
        (("--save-detailed",), "--save"),
        (("--extra-body", "[1]"), "JSON object"),
        ((*at_mock, "--dataset-name", "azure", "--dataset-path", str(odd)), "has no column"),
        ((*at_mock, "--random-input-len", "2M", "--num-prompts", "1"), "1048576"),
        ((*at_mock, "--tokenizer", str(odd)), "cannot read the tokenizer"),
    ):
        assert cli.main(["bench", "serve", *words]) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert [line.partition(":")[0].strip() for line in lines] == ["error", "why", "do"]
        assert said in " ".join(lines)


def test_a_family_of_commands_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert "serve" in capsys.readouterr().out
    assert_refused(tandem("bench", "sevre"), "did you mean serve?")
    assert_refused(tandem("bench", "serve", "--nun-prompts", "3"), "did you mean --num-prompts?")
    assert_refused(tandem("config", "bench"), "its commands do")
    assert "seed" in tandem("config", "bench", "serve", "--seed", "7").stdout
