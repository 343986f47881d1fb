"""Key files that others could read or change are rejected with a reason; pipes are accepted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.system import COMMAND, ROOT, SMALL, RunningSystem, TandemProcess, tandem
from tests.leaked_keys import keygen, new_key, watch
from tests.security.outside import ask, coordinator, request

NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
as_another = pytest.mark.skipif(shutil.which("setpriv") is None, reason="becomes another user by setpriv")


def _file(directory: Path, key: str, mode: int) -> Path:
    path = directory / "keys.txt"
    path.write_text(f"# ours\n\n{key}\n")
    path.chmod(mode)
    return path


def _start(*words: str | Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Load a configuration, as every command does at its start."""
    return tandem("config", *words, before=before)


def _start_as_nobody(groups: list[int], *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Do the same as another user that keeps root's right to read files: the installation may be readable by root
    only."""
    right = "+dac_override"
    before = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", f"--inh-caps={right}", f"--ambient-caps={right}"]
    before.append(f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups")
    return _start(*words, before=before)


def _refused(done: subprocess.CompletedProcess[str], path: Path, why: str, todo: str) -> None:
    assert done.returncode == 1, done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == f"error: will not use {path}" and why in lines[1] and todo in lines[2] and len(lines) == 3


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user can enter; pytest's own are not open to others."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize(
    ("command", "mode"),
    [("up", 0o644), *(("coordinator", mode) for mode in (0o644, 0o640, 0o604, 0o620, 0o602, 0o601, 0o777, 0o440))],
)
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, command: str, mode: int) -> None:
    path = _file(tmp_path, new_key(), mode)
    _refused(_start(command, "--api-key-file", path), path, "other users can read or write it", f"chmod 600 {path}")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_taken(tmp_path: Path, mode: int) -> None:
    assert _start("coordinator", "--api-key-file", _file(tmp_path, new_key(), mode)).returncode == 0


def test_key_file_check_follows_symlink(tmp_path: Path) -> None:
    path, link = _file(tmp_path, new_key(), 0o644), tmp_path / "link"
    link.symlink_to(path)
    _refused(_start("coordinator", "--api-key-file", link), link, "other users", f"chmod 600 {link}")
    path.chmod(0o600)
    assert _start("coordinator", "--api-key-file", link).returncode == 0


@as_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, new_key(), 0o600)
    os.chown(path, NOBODY, NOBODY)
    _refused(_start("coordinator", "--api-key-file", path), path, "belongs to another user", "chown")


@as_root
@as_another
@pytest.mark.parametrize(
    ("mode", "gid", "groups", "taken"),
    [
        (0o440, 2000, [2000], True),  # a Kubernetes secret with fsGroup and defaultMode 0440
        (0o640, 2000, [2000], True),
        (0o644, 2000, [2000], False),  # the same with Kubernetes' default mode
        (0o444, 0, [], False),
        (0o660, 2000, [2000], False),
        (0o440, NOBODY, [], True),
    ],
)
def test_root_may_hand_a_file_to_a_group(shared: Path, mode: int, gid: int, groups: list[int], taken: bool) -> None:
    path = _file(shared, new_key(), mode)
    os.chown(path, 0, gid)
    done = _start_as_nobody(groups, "coordinator", "--api-key-file", path)
    if taken:
        assert done.returncode == 0, done.stderr
    else:
        _refused(done, path, "other users can read or write it", "chmod 600")


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_files_of_cluster_keys_have_the_same_rule(tmp_path: Path, mode: int) -> None:
    path = keygen(tmp_path / "cluster.key")
    path.chmod(mode)
    for role in ("coordinator", "prefill"):
        done = tandem(role, "--cluster-key-file", path)
        _refused(done, path, "other users can read or write it", f"chmod 600 {path}")


SECRETS = [
    ("coordinator", "api_key: KEY"), ("up", "admin-api-key: KEY"), ("coordinator", "port: 8000\nadmin_api_key: 'KEY'"),
    ("prefill", "coordinator: localhost:1\napi_key: KEY"), ("bench serve", "header: [authorization=KEY]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "content", "mode"),
    [
        pytest.param(*secret, mode, marks=() if mode == 0o644 or secret == SECRETS[0] else pytest.mark.whole)
        for secret in SECRETS
        for mode in (0o666, 0o644, 0o640)
    ],
)
def test_a_configuration_with_a_key_has_the_same_rule(tmp_path: Path, command: str, content: str, mode: int) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text(content.replace("KEY", new_key()))
    path.chmod(mode)
    words = (*command.split(), "--config", path)
    secret = re.findall(r"(admin.api.key|api.key|header):", content)[0].replace("-", "_")
    said = f"other users can read or write it, and {secret} in it is secret"
    _refused(_start(*words), path, said, f"chmod 600 {path}")
    path.chmod(0o600)
    assert _start(*words).returncode == 0


def test_a_configuration_without_a_key_is_for_all(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("port: 8000\napi_key_file: keys.txt\nadmin_api_key:\n")
    path.chmod(0o644)
    assert _start("bench", "serve", "--config", path).returncode == 0


@pytest.mark.parametrize("content", ['port: 1\napi_key: "KEY', "port: 1\napi_key: KEY: x", "port: 1\nKEY: secret"])
def test_a_configuration_that_is_wrong_is_not_shown(tmp_path: Path, content: str) -> None:
    key, path = new_key(), tmp_path / "tandem.yaml"
    path.touch(0o600)
    path.write_text(content.replace("KEY", key))
    done = _start("coordinator", "--config", path)
    assert done.returncode == 1 and "line 2" in done.stderr and key[3:] not in done.stdout + done.stderr


@pytest.mark.parametrize("line", ["KEY\x01", "KEY\u20ac", "KEY\x7f"])
def test_a_line_that_can_be_no_key_is_named_and_not_shown(tmp_path: Path, line: str) -> None:
    key = new_key()
    path = tmp_path / "keys.txt"
    path.write_text(f"{new_key()}\n{line.replace('KEY', key)}\n")
    path.chmod(0o600)
    done = _start("coordinator", "--api-key-file", path)
    assert done.returncode == 1 and f"line 2 of {path} is not a valid key" in done.stderr and key not in done.stderr


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("# none\n\n")
    path.chmod(0o600)
    assert "holds no key" in _start("coordinator", "--api-key-file", path).stderr


@contextmanager
def _with_pipe(directory: Path, key: str, *words: str) -> Iterator[str]:
    """Start a server with ``--api-key-file <(printf KEY)`` and yield its URL."""
    reading, writing = os.pipe()
    os.write(writing, f"{key}\n".encode())
    os.close(writing)
    command = [*COMMAND, *words, "--port", "0", "--control-port", "0"]
    log = directory / "pipe.log"
    watch(log)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--api-key-file", f"/dev/fd/{reading}"], pass_fds=[reading], stdout=out, stderr=out, cwd=ROOT
        )
    os.close(reading)
    started = TandemProcess(log, process)
    try:
        yield RunningSystem._find_url(started)
    finally:
        started.stop()


def _opens(url: str, key: str) -> bool:
    refused = ask(url, request("GET", "/v1/models"))
    return (
        refused.status == 401 and ask(url, request("GET", "/v1/models", f"Authorization: Bearer {key}")).status == 200
    )


def test_a_named_pipe_is_read_once(tmp_path: Path) -> None:
    key, pipe = new_key(), tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    writer = threading.Thread(target=lambda: pipe.write_text(f"{key}\n"))
    writer.start()
    with coordinator(tmp_path, "--host", "0.0.0.0", "--api-key-file", str(pipe)) as system:
        assert _opens(system.url, key)
    writer.join()


@pytest.mark.parametrize("words", [("coordinator",), ("up", "--colocated", "1", *SMALL)], ids=["coordinator", "up"])
def test_a_pipe_of_the_shell_is_read_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    """With ``up``, the process that serves is a child of the one that received the pipe."""
    key = new_key()
    with _with_pipe(tmp_path, key, *words) as url:
        assert _opens(url, key)
