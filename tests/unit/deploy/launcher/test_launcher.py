"""Parts of the launcher: sharing cores, the status pipe, the built-in model, the first lines on the screen."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from common.checkpoint.files import open_checkpoint
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.platform.log import JsonFormatter, TextFormatter
from deploy.cli import main as cli
from deploy.launcher import builtin, cores, preflight, status
from deploy.launcher.child import how_it_ended
from deploy.launcher.gpus import Place
from deploy.launcher.preflight import check_up, check_worker, claim_port
from deploy.launcher.screen import Lines, Serving, Terminal, WorkerFacts, chat_ended
from deploy.launcher.supervisor import reachable
from tests.fakes.checkpoint import fake_checkpoint

IP_LOCAL_PORT_RANGE = 51
"""An option of setsockopt(2), since Linux 6.3."""


@pytest.mark.parametrize(
    ("count", "workers", "expected"),
    [
        (2, 2, [((0,), 1), ((1,), 1)]),
        (1, 1, [((0,), 1)]),
        (1, 3, [((0,), 1)] * 3),
        (2, 3, [((0,), 1), ((1,), 1), ((0,), 1)]),
        (4, 2, [((0, 1), 2), ((2, 3), 2)]),
        (5, 2, [((0, 1), 2), ((2, 3), 2)]),
        (8, 2, [((0, 1, 2, 3), 4), ((4, 5, 6), 3)]),
        (3, 1, [((0, 1), 2)]),
    ],
)
def test_cores_are_dealt_out(count: int, workers: int, expected: list[tuple[tuple[int, ...], int]]) -> None:
    assert [tuple(share) for share in cores.deal(range(count), workers)] == expected


@pytest.mark.parametrize("workers", range(1, 9))
def test_no_core_is_dealt_twice_while_there_are_enough(workers: int) -> None:
    for count in range(workers, 40):
        dealt = [core for share in cores.deal(range(count), workers) for core in share.cores or ()]
        assert len(dealt) == len(set(dealt)) <= count
        assert all(share.threads == len(share.cores or ()) for share in cores.deal(range(count), workers))


def test_a_worker_takes_those_of_its_cores_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    one, *_ = cores.usable_cores()
    assert cores.choose(None) is None and cores.choose((one, 4000)) == [one]
    assert cli.main(["prefill", "--cpus", "4000"]) == 1
    said = capsys.readouterr().err
    assert "--cpus 4000 names no usable core" in said and "Traceback" not in said


def test_a_quota_or_a_wish_changes_the_threads() -> None:
    assert cores.deal(range(64), 2, quota=8) == [cores.CoreShare(None, 4)] * 2
    assert [share.threads for share in cores.deal(range(8), 2, threads=2)] == [2, 2]
    assert cores.CoreShare((1, 2), 2).cpus == "1,2"


@pytest.mark.parametrize(
    ("chosen", "usable", "quota", "workers", "expected"),
    [((3, 4, 5), 8, 2, 4, 3), (None, 8, None, 1, 8), (None, 8, None, 2, 4), (None, 64, 4, 2, 2), (None, 2, None, 3, 1)],
)
def test_own_threads_divide_usable_cores(
    chosen: tuple[int, ...] | None,
    usable: int,
    quota: int | None,
    workers: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: tuple(range(usable)))
    monkeypatch.setattr(cores, "core_quota", lambda: quota)
    assert cores.own_threads(chosen, workers) == expected


def test_later_workers_get_free_or_least_used_cores() -> None:
    running = cores.deal(range(4), 2)[:1]  # (0, 1)
    assert cores.deal_more(range(4), running, 1) == [cores.CoreShare((2, 3), 2)]
    assert cores.deal_more(range(4), running, 2) == [cores.CoreShare((2,), 1), cores.CoreShare((3,), 1)]
    assert [share.cores for share in cores.deal_more(range(2), cores.deal(range(2), 2), 3)] == [(0,), (1,), (0,)]
    assert cores.deal_more(range(64), [cores.CoreShare(None, 4)] * 2, 2, quota=8) == [cores.CoreShare(None, 2)] * 2


def test_the_coordinator_runs_where_it_disturbs_the_fewest() -> None:
    one, two, three = cores.CoreShare((1,), 1), cores.CoreShare((2, 3), 2), cores.CoreShare((0,), 1)
    assert cores.beside(range(4), [one, two], [one]) == (0,), "the core that no worker has"
    assert cores.beside(range(4), [one, two, three], [one]) == (0, 2, 3)
    assert cores.beside(range(4), [one, two, three], [one, two]) == (0,)
    assert cores.beside(range(1, 4), [one, two], [one, two]) == (1, 2, 3), "there is none"
    assert cores.beside(range(2), [cores.CoreShare((0, 1), 2)], []) == (0, 1)


@pytest.mark.processes
def test_a_process_is_pinned_with_all_of_its_threads() -> None:
    allowed = os.sched_getaffinity(0)
    code = "import threading; threading.Thread(target=input, daemon=True).start(); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        threads = os.listdir(f"/proc/{child.pid}/task")
        assert len(threads) == 2
        cores.pin(child.pid, [min(allowed)])
        assert all(os.sched_getaffinity(int(each)) == {min(allowed)} for each in threads)
        cores.pin(child.pid, [1 << 20])  # there is no such core
        assert os.sched_getaffinity(child.pid) == {min(allowed)}
    finally:
        child.communicate()
    cores.pin(child.pid, [min(allowed)])  # it has ended


def test_the_quota_is_read(tmp_path: Path) -> None:
    assert cores.core_quota(tmp_path) is None
    for text, quota in (("max 100000\n", None), ("150000 100000\n", 2), ("50000 100000\n", 1), ("rubbish", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert cores.core_quota(tmp_path) == quota


def test_the_status_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(status._Sink, "fd", None)
    status.attach(writing)
    status.report("loading", 1, 3, "x" * 10_000)
    status.ready(kv_tokens=64, notes=["because"])
    status.failed(StartError("a", "b", "c"))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        loading, ready, failed = (status.read(line) for line in pipe)
    assert loading is not None and (loading.stage, loading.done, loading.total) == ("loading", 1, 3)
    assert ready is not None and ready.ready == {"kv_tokens": 64, "notes": ["because"]}
    assert failed is not None and failed.error is not None and failed.error.error().todo == "c"
    status.report("without a reader")  # a closed pipe is no error
    assert status.read(b'{"stage": "hal') is None


def test_without_a_supervisor_status_is_logged_once_per_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status._Sink, "fd", None)
    monkeypatch.setattr(status._Sink, "stage", "")
    with caplog.at_level(logging.INFO):
        for done in range(101):
            status.report("loading", done, 100)
        status.ready(kv_tokens=64, notes=["attention triton: it passed its trial"])
    assert [record.getMessage() for record in caplog.records] == [
        "loading",
        "loading 100/100",
        "attention triton: it passed its trial",
        "ready: kv_tokens 64",
    ]


def test_a_free_port_is_found_and_kept() -> None:
    with claim_port("127.0.0.1", 0, "--port") as claimed, socket.socket() as other, socket.socket() as ours:
        address = claimed.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(address)
        ours.listen()
        with pytest.raises(StartError, match="cannot listen"):
            claim_port("127.0.0.1", address[1], "--port")
    with pytest.raises(StartError, match="cannot listen"):
        claim_port("no.such.host.invalid", 80, "--port")


@pytest.mark.skipif(sys.platform != "linux", reason="how ports are given is Linux's")
def test_claimed_port_is_not_assigned_to_others() -> None:
    with claim_port("127.0.0.1", 0, "--port") as claimed, socket.create_server(("127.0.0.1", 0)) as server:
        port = claimed.getsockname()[1]
        for doing in ("dialling", "binding"):
            with socket.socket() as other:
                try:
                    other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
                except OSError:
                    pytest.skip("this kernel has one range of ports for all sockets")
                with pytest.raises(OSError, match=r"in use|assign"):
                    other.bind(("127.0.0.1", 0)) if doing == "binding" else other.connect(server.getsockname())


@pytest.mark.parametrize(("port", "control"), [(0, 0), (0, 8001), (8000, 0)])
def test_two_free_ports_are_never_the_same(
    port: int, control: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named ports are claimed first, and every claimed port is kept while the next is chosen."""
    kept = list[int]()

    def claim(host: str, wanted: int, flag: str) -> Any:
        number = wanted or min({8000, 8001, 8002} - {*kept})
        kept.append(number)
        claimed = mock.MagicMock(getsockname=lambda: (host, number))
        claimed.__enter__.return_value = claimed
        claimed.__exit__.side_effect = lambda *_: kept.remove(number)
        return claimed

    monkeypatch.setattr(preflight, "claim_port", claim)
    config = UpConfig(model=str(fake_checkpoint(tmp_path)), port=port, control_port=control, max_model_len=64)
    with check_up(config, [Place()] * 2) as checked:
        assert (checked.config.port, checked.config.control_port) == (8000, 8001)
        assert sorted(kept) == [8000, 8001]
    assert not kept
    with pytest.raises(StartError, match="both 8000"):
        check_up(replace(config, port=8000, control_port=8000), [Place()] * 2).__enter__()


@pytest.mark.parametrize(
    ("flags", "said"), [({"tensor_parallel_size": 2}, "among 2 ranks"), ({"quantization": "fp8"}, "in fp8")]
)
def test_quantized_weights_are_refused_before_anything_starts(flags: Any, said: str, tmp_path: Path) -> None:
    model = fake_checkpoint(tmp_path)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    content = json.loads((model / "config.json").read_text()) | {"quantization_config": settings}
    (model / "config.json").write_text(json.dumps(content))
    config = UpConfig(model=str(model), port=0, control_port=0, max_model_len=64, **flags)
    with pytest.raises(StartError, match=said) as caught:
        check_up(config, [Place()] * 2).__enter__()
    assert "GPTQ" in caught.value.why
    worker = WorkerConfig(model=str(model), role="decode", max_model_len=64, **flags)
    with pytest.raises(StartError, match=said):
        check_worker(open_checkpoint(str(model)), worker)


def test_text_is_checked_before_anything_starts(tmp_path: Path) -> None:
    model = fake_checkpoint(tmp_path / "model")
    config = UpConfig(model=str(model), port=0, control_port=0, max_model_len=64)
    with check_up(config, [Place()] * 2) as checked:
        assert checked.config.port > 0 and checked.chats
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    with check_up(config, [Place()] * 2) as checked:
        assert not checked.chats
    with pytest.raises(StartError, match="template"):
        check_up(replace(config, chat_template="{% for %}"), [Place()] * 2).__enter__()
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(StartError, match="cannot read"):
        check_up(config, [Place()] * 2).__enter__()
    (model / "tokenizer.json").unlink()
    with pytest.raises(StartError, match="has no tokenizer"):
        check_up(config, [Place()] * 2).__enter__()


def test_addresses_that_clients_can_use() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.1", "[::1]")] == [
        "127.0.0.1",
        "[::1]",
        "10.0.0.1",
        "[::1]",
    ]


NOTES = [
    "why",
    "KV pool 1.0 GiB: 65,536 tokens",
    "attention native for avx512",
    "28 linear layers packed for about 8 rows per step",
]
SERVING = Serving(
    model="tiny",
    url="http://127.0.0.1:8000",
    workers=(
        WorkerFacts(
            "prefill-0",
            "cores 0",
            {"kv_tokens": 65_536, "kv_bytes": 3 << 29, "max_model_len": 8192, "device": "cpu", "notes": NOTES},
        ),
        WorkerFacts("decode-0", "cores 1", {"kv_tokens": 1_000_000, "max_model_len": 1000}),
        WorkerFacts("decode-1", "", {}),
    ),
    links=({"transport": "shm", "gb_per_s": 5.04, "latency_us": 41.5, "from": "prefill-0", "to": "decode-0"},),
    keyed=False,
)


def test_the_first_screen_on_a_pipe_is_one_line_per_fact(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines()
    with caplog.at_level(logging.INFO):
        lines.begin("tandem: tiny", "")
        for done in range(3):
            lines.progress("decode-0", status.Report("loading", done, 2))
        lines.serving(SERVING)
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["tandem: tiny", "decode-0: loading"]
    assert "prefill-0: KV for 65,536 tokens in 1.5 GiB = 8 requests of 8,192 (cpu, cores 0)" in said
    assert "prefill-0: why" in said
    assert "transfer: shared memory, 5.0 GB/s, 42 µs" in said
    assert "page: http://127.0.0.1:8000/ui" in said
    assert "try: tandem chat" in said
    assert not any("\n" in line or "KV pool" in line or "attention" in line or "packed" in line for line in said)


@pytest.mark.parametrize(
    ("note", "shown"),
    [
        ("attention native for avx512", False),
        ("attention cpu: as requested", False),
        ("attention cpu: the kernels in C do not know KV in fp8, which makes decoding slower", True),
        ("attention triton: as requested", True),
    ],
)
def test_reasons_for_slow_attention_are_shown(note: str, shown: bool) -> None:
    assert WorkerFacts("decode-0", "", {"notes": [note]}).notes == [note] * shown


def test_a_model_without_chat_template_is_tried_with_a_prompt() -> None:
    curl, chat = SERVING.examples()
    assert "/v1/chat/completions" in curl and "messages" in curl and chat == "tandem chat"
    (curl,) = replace(SERVING, chats=False).examples()
    assert "/v1/completions" in curl and '"prompt"' in curl


def test_details_are_for_debugging_and_one_is_singular() -> None:
    facts = WorkerFacts("decode-0", "", {"kv_tokens": 1024, "max_model_len": 1000, "notes": NOTES}, detailed=True)
    assert facts.notes == [NOTES[0], *NOTES[2:]]
    assert facts.budget == "KV for 1,024 tokens = 1 request of 1,000"


def test_transfers_name_the_pair_when_there_are_several() -> None:
    slow = {"transport": "zmq", "gb_per_s": 0.0421, "latency_us": 900, "from": "prefill-0", "to": "decode-1"}
    assert replace(SERVING, links=(*SERVING.links, slow, {}, 3)).transfers() == [
        "prefill-0 to decode-0: shared memory, 5.0 GB/s, 42 µs",
        "prefill-0 to decode-1: ZeroMQ over TCP, 42.1 MB/s, 900 µs",
    ]
    assert replace(SERVING, links=("shm",)).transfers() == ["shared memory"]


def test_the_lines_to_try_work_as_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/tandem", "up"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    key, curl, chat = replace(SERVING, keyed=True).examples()
    assert key.startswith("export TANDEM_API_KEY=") and "$TANDEM_API_KEY" in curl
    assert chat == ".venv/bin/tandem chat"
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert SERVING.examples()[-1] == "tandem chat"


def test_how_to_name_a_model_is_said_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/tandem", "up"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert builtin.with_model(UpConfig(model=""), {})[1].endswith(": .venv/bin/tandem up Qwen/Qwen3-0.6B")
    assert builtin.with_model(UpConfig(model=""), {"MAKELEVEL": "1"})[1].endswith(': make up ARGS="Qwen/Qwen3-0.6B"')
    assert "the coordinator serves another model" in builtin.with_model(WorkerConfig(model="", role="decode"), {})[1]


def test_with_a_chat_the_keys_are_said_in_place_of_lines_to_try(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Lines().serving(replace(SERVING, chat=True))
    said = [record.getMessage() for record in caplog.records]
    assert not any("try" in line for line in said)
    assert said[-1] == "Ctrl-C stops an answer, Ctrl-D ends the chat and stops the server"


def test_the_end_of_a_chat_says_why_the_server_stops() -> None:
    assert chat_ended(True) == "the chat has ended; stopping the server"
    assert "standard input is not a terminal" in chat_ended(False)


def test_the_first_screen_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    screen = Terminal(console)
    screen.begin("tandem: tiny", "its weights are random")
    screen.progress("decode-0", status.Report("loading", 1, 2, "[shard]"))
    screen.log("a [line] of a child")
    screen.serving(SERVING)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[line]" in text and "http://127.0.0.1:8000" in text and "1000 requests of 1,000" in text
    curl = next(line for line in text.splitlines() if "curl" in line)
    assert json.loads(curl.split("-d ")[1].strip().strip("'"))["model"] == "tiny"


def test_the_clock_of_a_worker_runs_until_it_is_ready() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    screen = Terminal(console)
    stages = [("loading", 1, 2), ("loading", 2, 2), ("preparing", 0, 0), ("warming up", 0, 0)]
    for stage, done, total in stages:
        screen.progress("decode-0", status.Report(stage, done, total))
        (bar,) = screen._bars.tasks
        assert not bar.finished and bar.fields["text"].startswith(stage)
    screen.progress("decode-0", status.Report(ready={}))
    assert bar.finished and bar.finished_time is not None and bar.fields["text"] == "ready"


def test_endings_in_words() -> None:
    assert how_it_ended(3) == "exit code 3"
    assert "memory" in how_it_ended(-9)
    assert how_it_ended(-11) == "SIGSEGV"


def test_a_record_is_one_line_whatever_it_says() -> None:
    """Text from a client can neither forge another record nor send control characters to a terminal."""
    record = logging.LogRecord("tandem", logging.INFO, "file", 1, "%s", ("a\n12:00:00 b\r\x1b[2J\x9b\u2028\t",), None)
    text = TextFormatter("decode-0").format(record)
    assert text.endswith(r"decode-0: a\n12:00:00 b\r\x1b[2J\x9b\u2028\t") and len(text.splitlines()) == 1
    assert len(JsonFormatter("decode-0").format(record).splitlines()) == 1


def test_no_line_of_a_traceback_can_be_taken_for_a_record() -> None:
    forged = "a\n12:00:00 coordinator: b\r12:00:00 c\x1b[2J\x85\u2028d"
    try:
        try:
            raise KeyError(forged)
        except KeyError as error:
            error.add_note(forged)
            raise ValueError(forged) from error
    except ValueError:
        record = logging.LogRecord("tandem", logging.ERROR, "file", 1, "failed", (), sys.exc_info())
    first, *others = TextFormatter("decode-0").format(record).splitlines()
    assert first.endswith("decode-0 error: failed")
    assert all(line.startswith("    | ") and line.isprintable() for line in others)
    assert others[-2:] == ["    | ValueError: a", r"    | 12:00:00 coordinator: b\r12:00:00 c\x1b[2J\x85\u2028d"]
    assert len(JsonFormatter("decode-0").format(record).splitlines()) == 1


def test_log_formats() -> None:
    record = logging.LogRecord("tandem", logging.WARNING, "file", 1, "said %s", ("so",), None)
    record.request = "r1"
    assert TextFormatter("decode-0").format(record).endswith("decode-0 warning: said so")
    line = json.loads(JsonFormatter("decode-0").format(record))
    assert (line["message"], line["level"], line["process"], line["request"]) == (
        "said so",
        "warning",
        "decode-0",
        "r1",
    )
