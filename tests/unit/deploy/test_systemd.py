"""The systemd units in deploy/systemd run commands that our command line accepts, with files that it accepts."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.check import check_file
from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.net import keys
from common.platform import open_files, service_manager
from deploy.cli.commands import COMMANDS, load_config
from deploy.cli.main import build_parser
from tests.leaked_keys import new_key

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
FILES = sorted(FOLDER.glob("*.yaml"))
PROGRAM = "/opt/tandem/.venv/bin/tandem"
ROLES = {
    "tandem-up": "up",
    "tandem-coordinator": "coordinator",
    "tandem-prefill@": "prefill",
    "tandem-decode@": "decode",
}


def settings(unit: Path) -> dict[str, list[str]]:
    """Return the values of each setting of a unit, with continued lines joined."""
    found = dict[str, list[str]]()
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value.strip())
    return found


def test_there_is_a_unit_and_a_file_of_options_for_each_role() -> None:
    assert {unit.stem for unit in UNITS} == set(ROLES)
    assert {file.stem for file in FILES} == set(ROLES.values())


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_is_accepted(unit: Path, tmp_path: Path) -> None:
    """Also what it may bind: it would not be refused before it opens its model."""
    keys.make(tmp_path / "cluster.key")
    (tmp_path / "keys.txt").touch(0o600)
    (tmp_path / "keys.txt").write_text(new_key())
    found = settings(unit)
    (line,) = found["ExecStart"]
    copies = dict(each.split(":") for each in found.get("LoadCredential", ()))
    assert set(re.findall(r"%d/(\S+)", line)) == set(copies), "the keys that it names are those that it is given"
    for specifier, value in (("%d", str(tmp_path)), ("%H", "host"), ("%i", "1")):
        line = line.replace(specifier, value)
    program, *words = shlex.split(line.replace("/etc/tandem/", f"{FOLDER}/"))
    assert program == PROGRAM and "%" not in line
    name = words[0]
    assert name == ROLES[unit.stem]
    _, commands = build_parser()
    loaded = load_config(COMMANDS[name].config, vars(commands[name].parse_args(words[1:])), {}, **COMMANDS[name].fixed)
    loaded.config.check_binds()
    assert f"{FOLDER}/{name}.yaml" in loaded.origins.values()
    assert int(found["TimeoutStopSec"][0]) > loaded.config.drain_timeout
    assert int(found["LimitNOFILE"][0]) == open_files.MOST_FILES
    assert found["Type"] == ["notify"]
    if isinstance(loaded.config, CoordinatorConfig | WorkerConfig):
        with_keys = replace(loaded.config, cluster_key_file=str(tmp_path / "cluster.key"))
        assert with_keys == loaded.config, "the key of the unit, not one of the file"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_line_of_a_file_is_an_option_of_its_command(file: Path) -> None:
    configs = {name: command.config for name, command in COMMANDS.items()}
    assert not check_file(file, configs, file.stem)
    assert "# model:" in file.read_text(), "it shows how to name a model"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with the units, which start a program that is there."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    return tmp_path


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(installed: Path) -> None:
    def verified(*units: Path) -> str:
        command = ["systemd-analyze", "verify", "--man=no", *map(str, units)]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return found.stdout + found.stderr if found.returncode == 0 else f"exit code {found.returncode}: {found.stderr}"

    assert verified(*sorted(installed.glob("*.service"))) == ""
    wrong = installed / "wrong.service"
    wrong.write_text((installed / "tandem-up.service").read_text().replace("LimitNOFILE=", "LimitNOFILES="))
    assert "LimitNOFILES" in verified(wrong), "verify notices a setting that does not exist"


def test_systemd_is_told_when_a_service_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        service_manager.progress("loading 1/2\nMAINPID=1")
        service_manager.ready("serving")
        service_manager.stopping()
        assert manager.recv(4096) == b"STATUS=loading 1/2 MAINPID=1", "a text cannot add an assignment"
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
        assert manager.recv(4096) == b"STOPPING=1\nSTATUS=draining"
    service_manager.ready("nobody listens")
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    service_manager.ready("not started by systemd")


def test_abstract_sockets_of_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tandem-test-{id(monkeypatch)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        service_manager.ready("serving")
        assert manager.recv(4096).startswith(b"READY=1")
