"""Options: precedence, origins, spelling mistakes, sizes, and combinations that are refused."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import ssl
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp.client_exceptions import ClientConnectorError
from aiohttp.client_reqrep import ConnectionKey

from common.config.bench.compare import BenchCompareConfig
from common.config.chat import ChatConfig
from common.config.coordinator import CoordinatorConfig
from common.config.options import Loaded, Parser, add_options, options, parse_cpus, parse_number, show
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError, reason
from common.core.ids import WorkerName
from common.net import keys
from common.net.hosts import is_loopback, parse_address
from common.net.sockets import is_local
from deploy.cli.commands import CONFIGS, load_config
from tests.leaked_keys import new_key
from tests.pace import scaled


def up(*words: str, **environ: str) -> Loaded[UpConfig]:
    parser = Parser(prog="tandem up")
    add_options(parser, UpConfig)
    return load_config(UpConfig, vars(parser.parse_args(list(words))), environ)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("4_000", 4000),
        ("32k", 32_000),
        ("32K", 32_768),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("4GB", 4 * 10**9),
        ("1.5GiB", 3 << 29),
        ("2G", 2 << 30),
        ("512 MB", 512 * 10**6),
        ("7B", 7),
    ],
)
def test_numbers_and_sizes(text: str, value: int) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "4 XB", "0.5", "1.0001k", "٣k5", "1" * 400 + ".5G"])
def test_parse_number_rejects_invalid_text(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_number(text)


def test_a_value_that_is_flags_may_begin_with_dashes() -> None:
    """Behind = or as a word of its own, in either spelling of the flag; the words after it are not part of it."""
    parser = Parser(prog="tandem")
    commands = parser.add_subparsers()
    add_options(commands.add_parser("compare"), BenchCompareConfig)
    flags = "--no-lend-cores --chat-template my_own.jinja"
    for words in (
        ("--up-flags", flags, "--runs", "2"),
        ("--up_flags", flags, "--runs", "2"),
        ("--runs", "2", f"--up-flags={flags}"),
    ):
        assert vars(parser.parse_args(["compare", *words])) == {"up_flags": flags, "runs": "2"}
    assert parser.parse_args(["compare", "--up-flags", "--no-lend-cores"]).up_flags == "--no-lend-cores"
    with pytest.raises(StartError, match="--up-flags: expected one argument"):
        parser.parse_args(["compare", "--up-flags"])


def test_reasons_are_words_without_numbers_and_paths(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        (tmp_path / "none").read_text()
    assert reason(missing.value) == "No such file or directory"
    connection = OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)")
    assert reason(connection) == "Connection refused"
    with pytest.raises(OSError) as unknown:
        socket.getaddrinfo("nobody.invalid", 80, flags=socket.AI_NUMERICHOST)
    assert reason(unknown.value) == str(unknown.value), "numbers of the resolver are none of the system's"
    assert reason(ssl.SSLError(1, "certificate verify failed")) == "certificate verify failed", "nor are those of TLS"
    key = ConnectionKey("127.0.0.1", 9, False, None, None, None, None)
    assert reason(ClientConnectorError(key, connection)) == "Connection refused"
    assert reason(ValueError("so it is")) == "so it is" and reason(TimeoutError()) == "TimeoutError"


def test_cores_and_addresses() -> None:
    assert parse_cpus("0-3,5,2") == (0, 1, 2, 3, 5)
    assert parse_address("[::1]:8001") == ("[::1]", 8001)
    for text in ("", "3-1", "a", "1,,2", "0-99999999"):
        with pytest.raises(ValueError):
            parse_cpus(text)
    for text in ("host", ":1", "host:", "host:0", "host:65536"):
        with pytest.raises(ValueError):
            parse_address(text)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nblock_size: 32\nenable_prefix_caching: false\nexpect_decode: 4\n")
    loaded = up("--port", "3", "--config", str(file), TANDEM_PORT="2", TANDEM_MAX_NUM_SEQS="5")
    config, origins = loaded.config, loaded.origins
    assert (config.port, origins["port"]) == (3, "--port")
    assert (config.max_num_seqs, origins["max_num_seqs"]) == (5, "TANDEM_MAX_NUM_SEQS")
    assert (config.block_size, origins["block_size"]) == (32, str(file))
    assert (config.enable_prefix_caching, origins["enable_prefix_caching"]) == (False, str(file))
    assert (config.max_queued_requests, origins["max_queued_requests"]) == (2048, "default")
    assert up("--port", "3", TANDEM_CONFIG=str(file)).config.block_size == 32


def test_vllm_spellings() -> None:
    config = up("m", "--max_model_len=32K", "--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching").config
    assert (config.model, config.max_model_len, config.kv_cache_memory) == ("m", 32_768, 1 << 30)
    assert not config.enable_prefix_caching


def test_values_may_hold_underscores_and_dashes() -> None:
    assert up("--served-model-name", "my_model-1").config.served_model_name == "my_model-1"


def test_allowed_origins_are_such_that_browsers_send() -> None:
    named = ("https://a.example", "http://[::1]:3000", "chrome-extension://abcdef", "app://local")
    assert up("--allowed-origins", ",".join(named)).config.allowed_origins == named
    for scheme in ("about", "blob", "data", "file", "javascript", "JavaScript"):
        with pytest.raises(StartError, match="--allowed-origins cannot be"):
            up("--allowed-origins", f"https://a.example,{scheme}://a.example")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "eight"), "--port"),
        (("--port", "70000"), "65535"),
        (("--block-size", "15"), "a multiple of 16 from 16"),
        (("--block-size", "24"), "a multiple of 16 from 16"),
        (("--dtype", "int3"), "bfloat16"),
        (("--colocated", "2", "--decode", "1"), "--colocated"),
        (("--decode", "0"), "--decode"),
        (("--request-timeout", "nan"), "number"),
        (("--request-timeout", "0"), "from 0.001"),
        (("--kv-cache-memory", "0"), "greater than 0"),
        (("--kv-cache-memory", "0GiB"), "greater than 0"),
        (("--max-body-bytes", "0"), "greater than 0"),
        (("--max-queued-requests", "0"), "at least 1"),
        (("--num-kv-blocks", "0"), "at least 1"),
    ],
)
def test_bad_values_are_refused_in_words(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(StartError) as refused:
        up(*words)
    assert said in " ".join((refused.value.what, refused.value.why, refused.value.todo))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 1", "did you mean port?"),
        ("port: [1]", "not a single value"),
        ("allowed_origins: [[a]]", "not a single value"),
        ("allowed_origins: [a]", "allowed_origins in "),
        ("- port", "not a mapping"),
        ("port: {", "is not YAML"),
        ("port: x", "port in "),
    ],
)
def test_bad_files_are_refused_in_words(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(content)
    with pytest.raises(StartError) as refused:
        up("--config", str(file))
    assert said in " ".join((refused.value.what, refused.value.why, refused.value.todo))


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('port: 1\napi_key: "KEY', "line 2, column"),
        ("api_key: KEY: more", "(line 1, column"),
        ("api_key: !KEY 1", "the tag (line 1, column 10)"),
        ("api_key: *KEY", "undefined alias (line 1, column 10)"),
        ("api_key: !!int KEY", "its tag"),
        ("api_key: !!bool KEY", "its tag"),
        ("api_key: !!timestamp KEY", "its tag"),
        ("api_key: !!binary KEY\u20ac", "line 1, column 10"),
        ("%TAG !KEY! a:\n%TAG !KEY! a:\n--- 1", "duplicate tag handle (line 2, column 1)"),
        ("api_key: [KEY", "expected ',' or ']'"),
        ("api_key: @KEY", "found character '@' that cannot start any token (line 1, column 10)"),
        ("api_key: KEY\x01", "special characters are not allowed"),
        ("api_key: &a KEY\nb: &a KEY", "second occurrence (line 2, column 4)"),
        ("port: 1\nKEY: port", "line 2 of"),
        ("api_key KEY", "not a mapping"),
        ("api_key: [KEY]", "not a single value"),
        ("api_key: KEY\u20ac", "what was given"),
    ],
)
def test_config_error_names_option_without_its_value(tmp_path: Path, content: str, where: str) -> None:
    file, key = tmp_path / "tandem.yaml", new_key()
    file.touch(0o600)
    file.write_text(content.replace("KEY", key))
    with pytest.raises(StartError) as refused:
        up("--config", str(file))
    text = " ".join((refused.value.what, refused.value.why, refused.value.todo))
    assert where in text and key not in text and key.replace("-", "_") not in text
    assert key[3:] not in "".join(traceback.format_exception(refused.value, chain=True))


@pytest.mark.parametrize("form", ["sk-{}", "{}/ab+c=", "{}.ab.c", "./{}", "{}" * 300])
def test_a_key_where_a_file_belongs_is_not_shown(form: str) -> None:
    key = new_key()
    given = form.format(*[key] * 300)
    for words, environ, flag in (
        (("--api-key-file", given), {}, "--api-key-file"),
        ((), {"TANDEM_API_KEY_FILE": given}, "--api-key-file"),
        (("--config", given), {}, "--config"),
        ((), {"TANDEM_CONFIG": given}, "TANDEM_CONFIG"),
    ):
        with pytest.raises(StartError) as refused:
            up(*words, **environ)
        assert refused.value.what == "cannot read the file that was given" and flag in refused.value.todo
        assert key not in "".join(traceback.format_exception(refused.value, chain=True))


def test_a_file_that_is_missing_from_a_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for flag in ("--api-key-file", "--config"):
        with pytest.raises(StartError, match=f"cannot read {path}"):
            up(flag, str(path))


def test_a_pipe_without_a_writer_is_waited_for_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key, pipe, said = new_key(), tmp_path / "pipe", ""
    os.mkfifo(pipe, 0o600)
    monkeypatch.setattr("common.platform.secret_files.NOTICE_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(up, "--api-key-file", str(pipe))
        until = time.monotonic() + scaled(5)
        while not said and not reading.done() and time.monotonic() < until:
            time.sleep(0.01)  # another thread prints the notice
            said = capfd.readouterr().err
        pipe.write_text(key)
    assert said == f"waiting for a writer to {pipe}, which is a pipe\n"
    assert reading.result().config.api_keys() == (key,)
    monkeypatch.setattr("common.platform.secret_files.NOTICE_S", 60.0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(up, "--api-key-file", str(pipe))
        pipe.write_text(key)
    assert reading.result().config.api_keys() == (key,) and not capfd.readouterr().err


def test_a_missing_or_empty_file(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read"):
        up("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert up("--config", str(tmp_path / "empty.yaml")).config.port == 8000


def test_unknown_variables_are_warned_about() -> None:
    warnings = up(TANDEM_POTR="1", TANDEM_EXPECT_DECODE="1", OTHER="1").warnings
    assert len(warnings) == 1
    assert "did you mean TANDEM_PORT?" in warnings[0]


def test_a_secret_never_shows() -> None:
    client, admin = new_key(), new_key()
    loaded = up("--api-key", client, "--admin-api-key", admin)
    assert client not in repr(loaded) and admin not in repr(loaded)


def test_keys_come_from_the_flag_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    zero, one, two = new_key(), new_key(), new_key()
    file.write_text(f"# ours\n{one}\n\n {two} \n")
    config = up("--api-key", zero, "--api-key-file", str(file)).config
    file.write_text("\n")
    with pytest.raises(StartError, match="holds no key"):
        up("--api-key-file", str(file))
    file.unlink()  # the file is read only once, because it may be a pipe
    assert config.api_keys() == config.for_coordinator().api_keys() == (zero, one, two)
    assert zero not in repr(config) and two not in repr(config)


def test_other_addresses_than_loopback_need_a_word() -> None:
    up("--host", "0.0.0.0", "--insecure-http").config.check_binds()
    up("--host", "0.0.0.0", "--api-key", new_key()).config.check_binds()
    with pytest.raises(StartError, match="without a key"):
        up("--host", "0.0.0.0").config.check_binds()
    with pytest.raises(StartError, match="plain text"):
        CoordinatorConfig(model="m", control_host="10.0.0.1").check_binds()
    with pytest.raises(StartError, match="plain text"):
        WorkerConfig(role="decode", model="m", coordinator="10.0.0.1:8001").check_binds()
    with pytest.raises(StartError, match="plain text"):
        WorkerConfig(role="decode", model="m", host="10.0.0.1").check_binds()
    WorkerConfig(role="decode", model="m", host="10.0.0.1", insecure_cluster=True).check_binds()


def test_the_workers_of_other_machines_join_a_system_by_its_file_of_keys_alone(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    keys.make(file)
    open_to_all = up("--control-host", "10.0.0.1", "--cluster-key-file", str(file)).config
    open_to_all.check_binds()
    worker = open_to_all.for_worker("decode", WorkerName("decode-0"), coordinator="10.0.0.1:8001")
    assert (worker.host, worker.cluster_key_file) == ("10.0.0.1", None), "others reach it; it is given its keys"
    worker.check_binds(keys.load(file, "decode"))
    open_to_all.for_coordinator().check_binds(keys.load(file, "coordinator"))
    for words in ((), ("--insecure-cluster",)):
        with pytest.raises(StartError, match="needs --cluster-key-file"):
            up("--control-host", "10.0.0.1", *words).config.check_binds()
    with pytest.raises(StartError, match="not an address to which other machines can connect"):
        up("--control-host", "0.0.0.0", "--cluster-key-file", str(file)).config.check_binds()


def test_nixl_in_a_system_needs_a_word_since_it_has_no_keys() -> None:
    up("--kv-transport", "nixl", "--insecure-cluster").config.check_binds()
    for words in ((), ("--insecure-cluster", "--control-host", "10.0.0.1", "--cluster-key-file", "f")):
        with pytest.raises(StartError, match="not protected by keys"):
            up("--kv-transport", "nixl", *words).config.check_binds()


def test_a_system_has_keys_of_its_own_or_those_of_the_file(tmp_path: Path) -> None:
    minted, again = up().config.keys("coordinator"), up().config.keys("coordinator")
    assert set(minted) == set(keys.PARTIES)
    assert all(minted[party].secret != again[party].secret for party in keys.PARTIES)
    whole, part = tmp_path / "cluster.key", tmp_path / "decode.key"
    keys.make(whole)
    keys.narrow(whole, "decode", part)
    config = up("--cluster-key-file", str(whole)).config
    assert config.keys("coordinator", "decode") == {
        party: keys.load(whole, party) for party in ("coordinator", "decode")
    }
    with pytest.raises(StartError, match="cannot be used by a coordinator process"):
        up("--cluster-key-file", str(part)).config.keys("coordinator", "prefill", "decode")


@pytest.mark.parametrize(
    ("role", "coordinator", "host", "expected"),
    [
        ("decode", "10.0.0.1:8001", "127.0.0.1", True),
        ("decode", "10.0.0.1:8001", "10.0.0.2", False),
        ("decode", "127.0.0.1:8001", "127.0.0.1", False),
        ("prefill", "10.0.0.1:8001", "127.0.0.1", False),  # prefill dials and is never dialed
    ],
)
def test_a_worker_that_others_could_not_reach_is_known(role: Any, coordinator: str, host: str, expected: bool) -> None:
    assert WorkerConfig(role=role, model="m", coordinator=coordinator, host=host).out_of_reach == expected


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("127.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_loopback_rule_is_same_for_options_and_sockets(host: str, here: bool) -> None:
    """Options and sockets use the same rule: a host name is never taken for an address, whatever its beginning."""
    assert is_loopback(host) == is_local(host) == is_local(f"tcp://{host}:8001") == here


def test_up_makes_the_configuration_of_its_parts() -> None:
    key = new_key()
    config = up("m", "--host", "0.0.0.0", "--api-key", key, "--max-num-seqs", "3", "--served-model-name", "n").config
    worker = config.for_worker("prefill", WorkerName("prefill-0"), threads=2)
    assert (worker.role, worker.name, worker.host) == ("prefill", "prefill-0", "127.0.0.1")
    assert (worker.model, worker.max_num_seqs, worker.threads, worker.served_name) == ("m", 3, 2, "n")
    coordinator = config.for_coordinator(expect_decode=2)
    assert (coordinator.host, coordinator.api_key, coordinator.expect_decode, coordinator.control_host) == (
        "0.0.0.0",
        key,
        2,
        "127.0.0.1",
    )


@pytest.mark.parametrize(
    ("words", "cores", "pools"),
    [
        ((), 2, (1, 1, 0)),
        ((), 1, (0, 0, 1)),
        (("--decode", "2"), 8, (1, 2, 0)),
        (("--decode", "2"), 1, (1, 2, 0)),
        (("--prefill", "3"), 8, (3, 1, 0)),
        (("--prefill", "0"), 8, (0, 1, 0)),
        (("--colocated", "2"), 8, (0, 0, 2)),
    ],
)
def test_pools(words: tuple[str, ...], cores: int, pools: tuple[int, int, int]) -> None:
    assert up(*words).config.pools(cores) == pools


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_option_can_be_set_everywhere(config: type[Any], tmp_path: Path) -> None:
    """Each default, written out, is accepted unchanged as a flag, a variable and a YAML key."""
    fixed: dict[str, Any] = {"role": "prefill"} if config is WorkerConfig else {}
    parser = Parser(prog="tandem")
    add_options(parser, config)
    for item in options(config):
        if item.default is None:
            continue
        text = show(item.default)
        assert getattr(load_config(config, {}, {item.env: text}, **fixed).config, item.name) == item.default
        file = tmp_path / "one.yaml"
        file.write_text(f"{item.name}: {text}\n")
        loaded = load_config(config, {"config": str(file)}, {}, **fixed)
        assert getattr(loaded.config, item.name) == item.default
        if not isinstance(item.default, bool):
            given = vars(parser.parse_args([item.flag, text]))
            assert getattr(load_config(config, given, {}, **fixed).config, item.name) == item.default


def test_the_same_name_means_the_same_kind_everywhere() -> None:
    """One environment and one file serve every role, so an option's name must expect the same kind of value in all."""
    kinds: dict[str, str] = {}
    for config in CONFIGS:
        for item in options(config):
            assert kinds.setdefault(item.name, item.kind.expects) == item.kind.expects, item.name


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChatConfig().url = "x"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["0.4", "61", "nan", "soon"])
@pytest.mark.parametrize("config", [UpConfig, CoordinatorConfig])
def test_a_failure_timeout_that_cannot_work_is_refused(config: type[Any], text: str) -> None:
    with pytest.raises(StartError, match=r"--failure-timeout.*0\.5 to 60"):
        load_config(config, {"model": "m", "failure_timeout": text}, {})
    assert load_config(config, {"model": "m", "failure_timeout": "0.5"}, {}).config.failure_timeout == 0.5
