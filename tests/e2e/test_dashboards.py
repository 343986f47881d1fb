"""A real Prometheus scrapes a live system under load: every panel of the dashboards and every recording rule returns
data, and no alert fires."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.net.http_client import HttpClient, HttpError
from deploy.cli.dashboards import DASHBOARDS
from tests.e2e.system import RunningSystem
from tests.leaked_keys import new_key, watch
from tests.pace import scaled
from tests.promql import ROOT, program

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.whole,
    pytest.mark.skipif(program("prometheus") is None, reason="no Prometheus: make .cache/prometheus"),
]
FOLDER = ROOT / "deploy" / "prometheus"
SCRAPE_S = 1
WINDOW_S = 15
"""The window of rates, in place of Grafana's."""
HEARTBEAT_S = 1.0
"""Upper bound of the interval of heartbeats."""
DATA_S = 60.0
VARIABLES = {"$__rate_interval": f"{WINDOW_S}s", "$__range": "60s", "$instance": ".*"}
EXPRESSIONS = [
    pytest.param(query.expr, panel.unit, id=f"{dashboard.name}: {panel.title}: {query.legend}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for query in panel.queries
]
RECORDED = [
    rule["record"]
    for group in yaml.safe_load((FOLDER / "recording.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, and its log."""

    url: str
    log: Path

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each sample of ``expr`` now."""
        words = urllib.parse.urlencode({"query": expr})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=scaled(10)) as response:
            result = json.load(response)["data"]["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    def until_data(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return the finite samples of ``expr`` once there are any; AssertionError after DATA_S."""
        deadline = time.monotonic() + scaled(DATA_S)
        while not (found := [sample for sample in self.query(expr) if math.isfinite(sample[1])]):
            assert time.monotonic() < deadline, f"no data: {expr}\n{self.query(expr)}"
            time.sleep(SCRAPE_S)
        return found


@contextlib.contextmanager
def _prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """Run Prometheus with the repository's configuration, but for the target and the intervals."""
    found = program("prometheus")
    assert found is not None
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = directory / "prometheus.log"
    watch(log)
    options = [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("wb") as out:
        process = subprocess.Popen([found, f"--config.file={file}", *options], stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _until(lambda: _answers(f"{url}/-/ready"), process, log)
        yield Prometheus(url, log)
    finally:
        process.terminate()
        process.wait()


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + scaled(30)
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=scaled(5)) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def _load(url: str, key: str, other: str) -> Iterator[None]:
    """Send requests of every kind that the dashboards show, one after another in each of three threads."""
    client, second, stranger = HttpClient(url, key), HttpClient(url, other), HttpClient(url, "no-key")
    model, ended = client.model(), threading.Event()
    prompt = "The same long beginning of every prompt. " * 8

    def streams() -> None:
        chat = {
            "model": model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 24,
            "ignore_eos": True,
        }
        while not ended.is_set():
            for _ in client.chat(chat):
                pass
            stopped = client.chat(chat)
            next(stopped)
            stopped.close()  # the client leaves

    def completions() -> None:
        while not ended.is_set():
            second.post("/v1/completions", {"model": model, "prompt": prompt, "n": 2, "max_tokens": 8})

    def mistakes() -> None:
        while not ended.wait(0.2):
            for sender, status in (client, 400), (stranger, 401):
                with pytest.raises(HttpError) as raised:
                    sender.post("/v1/completions", {"model": model, "prompt": 5})
                assert raised.value.status == status

    with ThreadPoolExecutor(3) as pool:
        senders = [pool.submit(each) for each in (streams, completions, mistakes)]
        try:
            yield
        finally:
            ended.set()
    for sender in senders:
        sender.result()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, spawner: None) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ``tandem up`` with the built-in model under a small load."""
    directory = tmp_path_factory.mktemp("watched")
    keys, first, second = directory / "keys.txt", new_key(), new_key()
    keys.touch(mode=0o600)
    keys.write_text(f"# name: team-a\n{first}\n# name: team-b\n{second}\n")
    flags = ("--port", "0", "--control-port", "0", "--num-kv-blocks", "1024", "--api-key-file", str(keys))
    with RunningSystem.running(directory / "up.log", "up", *flags) as system:
        target = urllib.parse.urlsplit(system.url).netloc
        with _prometheus(directory, target) as prometheus, _load(system.url, first, second):
            prometheus.until_data(f"count_over_time(up[{WINDOW_S}s]) >= {WINDOW_S - 2}")
            yield prometheus


@pytest.mark.parametrize(("expr", "unit"), EXPRESSIONS)
def test_a_panel_returns_data(watched: Prometheus, expr: str, unit: str) -> None:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    found = [value for _, value in watched.until_data(expr)]
    assert all(value >= 0 for value in found)
    if unit == "percentunit":  # counters arrive with heartbeats, so a rate may be off by one of these
        assert all(value <= 1 + HEARTBEAT_S / WINDOW_S for value in found)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_returns_data(watched: Prometheus, name: str) -> None:
    watched.until_data(name)


def test_use_is_counted_by_the_names_of_keys(watched: Prometheus) -> None:
    used = watched.until_data("sum by (key_name) (tandem_key_output_tokens_total)")
    assert {labels["key_name"] for labels, value in used if value > 0} == {"team-a", "team-b"}
    ended = watched.until_data("sum by (key_name, outcome) (tandem_key_requests_total) > 0")
    assert ("team-a", "aborted") in {(labels["key_name"], labels["outcome"]) for labels, _ in ended}


def test_every_rule_is_evaluated_and_no_alert_fires(watched: Prometheus) -> None:
    assert watched.until_data("sum(prometheus_rule_evaluation_failures_total) or vector(0)")[0][1] == 0
    with urllib.request.urlopen(f"{watched.url}/api/v1/rules", timeout=scaled(10)) as response:
        rules = [rule for group in json.load(response)["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]


def test_a_scrape_is_small_and_fast(watched: Prometheus) -> None:
    assert watched.until_data('max_over_time(scrape_samples_scraped{job="tandem"}[1m])')[0][1] < 2000
    assert watched.until_data('quantile_over_time(0.5, scrape_duration_seconds{job="tandem"}[1m])')[0][1] < scaled(0.2)
