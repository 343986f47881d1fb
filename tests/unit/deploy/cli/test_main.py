"""The ``tandem`` command: how a failed start looks, that help imports little, and how mistyped words are handled."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import get_type_hints

import pytest

from bench.commands import compare
from bench.simulate import prediction
from common.core.errors import StartError
from common.net import http_client
from deploy.cli import main as cli
from deploy.cli.commands import COMMANDS, Command
from deploy.launcher.preflight import check_name
from tests.fakes.checkpoint import fake_checkpoint
from tests.leaked_keys import new_key
from tests.pace import scaled

LIMIT_S = scaled(20.0)
"""A refusal takes one to two seconds on a quiet machine, and seven beside other tests; retrying a network or loading
weights first would take minutes."""
HEAVY = ("torch", "transformers", "aiohttp", "zmq", "triton", "flash_attn", "huggingface_hub")


def tandem(*words: str, stdin: str = "", timeout_s: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, without the settings of the caller's environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words],
        env={**clean, "HF_HUB_OFFLINE": "1", **environ},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=scaled(timeout_s),
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *said: str) -> None:
    """Check for at most five lines with error, why and what to do, no traceback, and a non-zero exit code."""
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert 3 <= len(lines) <= 5, result.stderr
    assert "Traceback" not in result.stderr
    assert [line.split(":")[0].strip() for line in lines[-3:]] == ["error", "why", "do"]
    for text in said:
        assert text in result.stderr


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def encoder_decoder(tmp_path: Path) -> Path:
    """Return the directory of a model that Tandem cannot serve."""
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_help_is_light_and_quick() -> None:
    program = (
        "import sys; from deploy.cli import main as cli\n"
        "try: cli.main(['up', '--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60), check=True
    )
    assert result.stderr.strip() == "[]"
    assert "--max-model-len" in result.stdout


def test_no_arguments_and_version() -> None:
    assert "up" in tandem().stdout
    assert tandem("--version").stdout.strip() == f"tandem {cli.version()}"


def test_commands_run_from_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    parser, _ = cli.build_parser()
    assert "bench" in parser.format_help() and cli.version() == "source"


@pytest.mark.parametrize("command", ["up", "coordinator", "prefill", "decode"])
def test_a_missing_directory(command: str) -> None:
    started = time.monotonic()
    assert_refused(tandem(command, "/no/such/directory"), "/no/such/directory")
    assert time.monotonic() - started < LIMIT_S


def test_a_hub_id_that_cannot_be_had() -> None:
    started = time.monotonic()
    assert_refused(tandem("up", "nobody/nothing"), "nobody/nothing")
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("command", ["up", "decode"])
def test_an_unsupported_architecture(command: str, encoder_decoder: Path) -> None:
    started = time.monotonic()
    assert_refused(tandem(command, str(encoder_decoder)), "encoder-decoder")
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("command", ["up", "coordinator", "prefill", "decode"])
def test_a_quantized_checkpoint(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything heavy is imported, also by a worker that is started alone."""
    config = json.loads((fake_checkpoint(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    assert cli.main([command, str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "its weights are quantized with HQQ" in lines[1], lines


def test_a_coordinator_whose_name_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def getaddrinfo(host: str, *_: object, **__: object) -> None:
        assert host == "absent.example"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("deploy.launcher.preflight.socket.getaddrinfo", getaddrinfo)
    assert cli.main(["prefill", "--coordinator", "absent.example:8001", "--insecure-cluster"]) == 1
    assert "the name absent.example cannot be resolved: Name or service not known" in capsys.readouterr().err


def test_addresses_of_a_coordinator_need_no_name() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        check_name(f"{host}:8001")


@pytest.mark.parametrize("command", ["up", "coordinator"])
def test_a_model_without_a_tokenizer(command: str, tmp_path: Path) -> None:
    (fake_checkpoint(tmp_path) / "tokenizer.json").unlink()
    started = time.monotonic()
    result = tandem(command, str(tmp_path), "--port", "0", "--control-port", "0", "--max-model-len", "64")
    assert_refused(result, "no tokenizer.json")
    assert result.stdout == "", "no process was started for it"
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
def test_a_busy_port(flag: str, busy_port: int) -> None:
    other = {"--port": "--control-port", "--control-port": "--port"}[flag]
    started = time.monotonic()
    assert_refused(tandem("up", flag, str(busy_port), other, "0"), str(busy_port), flag)
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("command", ["up", "prefill"])
def test_too_little_memory_for_one_request(command: str) -> None:
    started = time.monotonic()
    words = ("--max-model-len", "2048", "--kv-cache-memory", "1MiB")
    assert_refused(tandem(command, *words), "too little memory", "--kv-cache-memory")
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("command", ["up", "decode"])
def test_more_memory_than_there_is(command: str) -> None:
    assert_refused(tandem(command, "--kv-cache-memory", "900000GiB"), "KV for each of", "memory free")


@pytest.mark.parametrize(("command", "flag"), [("decode", "--host"), ("coordinator", "--control-host")])
def test_an_address_of_another_machine(command: str, flag: str) -> None:
    """192.0.2.1 is reserved for documentation (RFC 5737): no machine has it."""
    words = (flag, "192.0.2.1", "--insecure-cluster", *(("--port", "0") if command == "coordinator" else ()))
    assert_refused(tandem(command, *words), "cannot listen on", "an address of this machine")


def test_two_ports_that_are_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    assert_refused(tandem("up", "--port", port, "--control-port", port), "needs its own")


def test_mistyped_words() -> None:
    assert_refused(tandem("up", "--prot", "80"), "--prot", "did you mean --port?")
    assert_refused(tandem("decode", "--max_model_length", "80"), "did you mean --max-model-len?")
    assert_refused(tandem("upp"), "did you mean up?")
    assert_refused(tandem("up", "--port", "eight"), "whole number")
    assert_refused(tandem("up", "--port"), "--port", "tandem up --help")
    assert_refused(tandem("up", "model", "another"), "another")
    assert_refused(tandem("up", "--colocated", "1", "--prefill", "1"), "--colocated")


def test_addresses_that_others_could_reach() -> None:
    assert_refused(tandem("up", "--host", "0.0.0.0"), "--insecure-http")
    assert_refused(tandem("decode", "--coordinator", "10.0.0.1:8001"), "--insecure-cluster")


def _in_foreground() -> None:
    """Restore SIGINT: a shell makes its background jobs ignore it, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("imported", [0.0, 0.4], ids=["at once", "in the middle"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ctrl_c_while_torch_is_imported_says_nothing(role: str, imported: float, tmp_path: Path) -> None:
    words = [role, str(fake_checkpoint(tmp_path)), "--coordinator", "127.0.0.1:9", "--max-model-len", "64"]
    command = [sys.executable, "-m", "deploy.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_in_foreground) as worker:
        assert worker.stderr is not None
        assert "importing" in worker.stderr.readline()
        time.sleep(imported)  # somewhere inside the imports; there is no event to wait for
        worker.send_signal(signal.SIGINT)
        assert worker.wait(LIMIT_S) == -signal.SIGINT, "a shell calls it 130"
        assert worker.stderr.read() == ""


def test_interrupted_measurement_reports_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.commands import roofline

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(roofline, "measure", interrupted)
    assert cli.main(["bench", "roofline"]) == 130
    assert "interrupted before there was a result" in capsys.readouterr().err


def test_debug_adds_the_traceback() -> None:
    assert "Traceback" in tandem("up", "/no/such/directory", "--debug").stderr


def test_a_chat_without_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert_refused(tandem("chat", "hello", "--url", f"http://127.0.0.1:{port}"), "tandem up")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://x", "not the address"),
        ("http://localhost:99999", "99999 is not the address"),
        ("localhost:eight", "not the address"),
        ("http://[::1", "not the address"),
        ("http://", "not the address"),
        ("http://localhost/v1?key=1", "not the address"),
        ("http://a b", "not the address"),
        (f"http://{'a' * 64}.example", "cannot reach"),
    ],
)
def test_chat_reports_unusable_url(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "hello", "--url", url]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and said in lines[0] and "--url" in lines[2], lines


def test_a_chat_with_a_server_that_speaks_no_http(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=_answer_rubbish, args=(server,))
        answering.start()
        assert cli.main(["chat", "hello", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
        answering.join()
    assert "cannot reach" in capsys.readouterr().err


def _answer_rubbish(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"SSH-2.0-rubbish\r\n")


def test_config_says_where_each_value_comes_from() -> None:
    key = new_key()
    result = tandem("config", "up", "--port", "7", TANDEM_MAX_NUM_SEQS="3", TANDEM_API_KEY=key, TANDEM_POTR="1")
    assert result.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert rows["port"] == ["7", "--port"]
    assert rows["max_num_seqs"] == ["3", "TANDEM_MAX_NUM_SEQS"]
    assert rows["block_size"] == ["16", "default"]
    assert rows["api_key"] == ["(hidden)", "TANDEM_API_KEY"]
    assert key not in result.stdout
    assert "did you mean TANDEM_PORT?" in result.stderr
    assert "coordinator " in tandem("config", "decode").stdout
    for word in ("--help", "-h"):
        shown = tandem("config", word)
        assert shown.returncode == 0 and shown.stdout.startswith("usage: tandem config [COMMAND] [FLAGS]")
    assert tandem("config", "decode", "--help").stdout.startswith("usage: tandem decode")
    assert "port " in tandem("config").stdout


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_the_function_of_a_command_takes_its_configuration(command: Command) -> None:
    function = command.load_function()
    first, *others = inspect.signature(function).parameters.values()
    assert get_type_hints(function)[first.name] is command.config
    assert [each.name for each in others] == ([] if command.argument is None else [command.argument[0]])


@pytest.mark.parametrize(
    "words", [("chat", "--url", "http://me:{}@127.0.0.1:1"), ("bench", "compare", "--up-flags", "--api-key {}")]
)
def test_config_shows_no_key_that_stands_inside_a_value(words: tuple[str, ...]) -> None:
    key = new_key()
    result = tandem("config", *(word.format(key) for word in words))
    assert result.returncode in (0, 1) and "Traceback" not in result.stderr
    assert key not in result.stdout + result.stderr


def test_command_ends_silently_on_closed_pipe() -> None:
    """The reader of a pipe may close it early, as head does after ten lines."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "deploy.cli", "config", "up"]
    with os.fdopen(writing) as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 128 + signal.SIGPIPE and not done.stderr


def test_config_of_a_mistyped_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for word, meant in (("prefil", "prefill"), ("decoder", "decode"), ("upp", "up")):
        assert cli.main(["config", word]) == 1
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 3)
        assert f"did you mean {meant}?" in err
    for words in (["Qwen/Qwen3-0.6B"], ["up", "prefil"], ["--port", "7"]):
        assert cli.main(["config", *words]) == 0
    (tmp_path / "prefil").mkdir()
    assert cli.main(["config", "prefil"]) == 0, "that directory may well be a model"


def test_chat_times_out_on_silent_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker's port accepts and sends nothing. The first page that is fetched costs a server no time: its deadline is
    short."""
    monkeypatch.setattr(http_client, "PAGE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert cli.main(["chat", "hello", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
    assert "cannot reach" in (error := capsys.readouterr().err) and "timed out" in error


def test_long_reasons_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli.print_error(StartError("what", "why\n" * 500, "todo"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) < 400


def test_errors_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The words may be those of a server, or of a file."""
    cli.print_error(StartError("what", "\x1b]0;x\x07\x9b2J", "\x1b[31m"))
    assert capsys.readouterr().err.splitlines() == ["error: what", "  why: ?]0;x??2J", "   do: ?[31m"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --goodput foo:1", "--goodput cannot be 'foo:1'"),
        ("goodput --url http://127.0.0.1:9 --goodput ttft:0x", "--goodput cannot be 'ttft:0x'"),
        ("plan --check {}/nowhere.json", "No such file or directory"),
        ("plan --check {}", "Is a directory"),
        ("plan --cost {}/nowhere/cost.json", "correct --cost"),
    ],
)
def test_benchmark_checks_options_before_start(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (compare, prediction):
        monkeypatch.setattr(module, "running", lambda *_: pytest.fail("something was started"))
    assert cli.main(["bench", *words.format(tmp_path).split()]) == 1
    error = capsys.readouterr().err
    assert said in error and "cannot reach" not in error


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--save", "{}/nowhere/x.json"), "there is no directory"),
        (("--save", "{}"), "it is a directory"),
        (("--plot", "{}/nowhere/x.png"), "there is no directory"),
        (("--plot", "{}/x.foo"), "does not end in .png"),
    ],
)
def test_outputs_are_checked_before_anything_is_measured(
    words: tuple[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed_port = ("--url", "http://127.0.0.1:9")
    assert cli.main(["bench", "serve", *closed_port, words[0], words[1].format(tmp_path)]) == 1
    assert why in capsys.readouterr().err and not list(tmp_path.iterdir())
