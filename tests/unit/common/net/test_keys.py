"""Cluster keys: the key file, its permissions, and the addresses that keys permit."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.net import keys
from common.net.keys import PARTIES
from deploy.cli import main as cli
from deploy.launcher import process


def test_keygen_writes_a_file_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = tmp_path / "cluster.key", tmp_path / "decode.key"
    assert cli.main(["keygen", "--out", str(whole)]) == 0
    assert cli.main(["keygen", "--role", "decode", "--cluster-key-file", str(whole), "--out", str(part)]) == 0
    assert whole.stat().st_mode & 0o777 == part.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["cluster.key", "decode.key"], "no temporary file is left"
    secrets = json.loads(whole.read_text())["secret"]
    assert set(secrets) == set(PARTIES)
    text = part.read_text()
    assert secrets["decode"] in text and not any(secrets[each] in text for each in PARTIES if each != "decode")
    assert all(secret not in capsys.readouterr().out for secret in secrets.values())
    assert keys.load(part, "decode") == keys.load(whole, "decode")
    with pytest.raises(StartError, match="cannot be used by a prefill process"):
        keys.load(part, "prefill")


def test_keygen_overwrites_only_with_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.key"
    assert cli.main(["keygen", "--out", str(path)]) == 0
    before = path.read_text()
    assert cli.main(["keygen", "--out", str(path)]) == 1
    assert path.read_text() == before and "--overwrite" in capsys.readouterr().err
    assert cli.main(["keygen", "--out", str(path), "--overwrite"]) == 0
    assert path.read_text() != before
    assert cli.main(["keygen", "--out", str(tmp_path / "no" / "such" / "place")]) == 1
    assert cli.main(["keygen", "--role", "decode"]) == 1, "one role's keys must come from somewhere"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_open_is_refused(cluster_key: Path, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open.key"
    path.write_bytes(cluster_key.read_bytes())
    path.chmod(mode)
    with pytest.raises(StartError, match="other users") as caught:
        keys.load(path, "decode")
    assert "chmod 600" in caught.value.todo


def _swapped(content: Any) -> None:
    content["secret"]["decode"], content["secret"]["prefill"] = (
        content["secret"]["prefill"],
        content["secret"]["decode"],
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.clear(),
        lambda content: content["public"].pop("decode"),
        lambda content: content["public"].update(decode=content["public"]["prefill"]),
        lambda content: content["secret"].update(decode="too short"),
        lambda content: content["secret"].update(decode=" " * 40),
        lambda content: content["secret"].update(decode=7),
        lambda content: content.update(secret=[]),
        lambda content: content.update(tandem_cluster_keys=2),
        _swapped,
    ],
)
def test_a_spoilt_file_is_refused_in_words(cluster_key: Path, tmp_path: Path, spoil: Callable[[Any], None]) -> None:
    content = json.loads(cluster_key.read_text())
    spoil(content)
    path = tmp_path / "spoilt.key"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    with pytest.raises(StartError, match="not a file of cluster keys"):
        keys.load(path, "decode")
    path.write_bytes(b"\xff\x00")
    with pytest.raises(StartError, match="not JSON"):
        keys.load(path, "decode")
    with pytest.raises(StartError, match="cannot read"):
        keys.load(tmp_path / "nowhere", "decode")


@pytest.mark.parametrize("member", ["public", "secret"])
def test_a_key_in_place_of_a_role_is_not_shown(cluster_key: Path, tmp_path: Path, member: str) -> None:
    content = json.loads(cluster_key.read_text())
    key = content["secret"]["decode"]
    content[member] = {key: "decode", **content[member]}
    path = tmp_path / "swapped.key"
    path.touch(0o600)
    path.write_text(json.dumps(content))
    with pytest.raises(StartError, match="a key has an unknown role") as refused:
        keys.load(path, "decode")
    assert key not in "".join(traceback.format_exception(refused.value))


def test_keys_open_other_addresses_than_loopback(cluster_key: Path) -> None:
    CoordinatorConfig(model="m", control_host="10.0.0.1", cluster_key_file=str(cluster_key)).check_binds()
    WorkerConfig(role="decode", model="m", host="10.0.0.1", cluster_key_file=str(cluster_key)).check_binds()
    with pytest.raises(StartError) as caught:
        WorkerConfig(role="decode", model="m", host="10.0.0.1").check_binds()
    assert "--cluster-key-file" in caught.value.todo and "tandem keygen" in caught.value.todo
    with pytest.raises(StartError, match="needs keys"):
        WorkerConfig(role="decode", model="m", kv_encryption="curve").check_binds()
    nixl = WorkerConfig(role="decode", model="m", kv_transport="nixl", cluster_key_file=str(cluster_key))
    for host in ("127.0.0.1", "10.0.0.1"):
        for accepted in (False,) if host == "127.0.0.1" else (False, True):
            with pytest.raises(StartError, match="cannot encrypt"):
                dataclasses.replace(nixl, host=host, insecure_cluster=accepted).check_binds()
    dataclasses.replace(nixl, kv_encryption="none").check_binds()
    dataclasses.replace(nixl, insecure_cluster=True).check_binds()


def test_minted_keys_reach_a_child_and_no_text() -> None:
    minted = keys.mint()
    assert {party: each.party for party, each in minted.items()} == {party: party for party in PARTIES}
    for each in minted.values():
        assert zmq.curve_public(each.secret) == each.public[each.party]
    launch = process.ChildLaunch("worker", {}, keys=minted["decode"])
    assert msgspec.json.decode(msgspec.json.encode(launch), type=process.ChildLaunch) == launch
    assert minted["decode"].secret.decode() not in repr(launch)
    sent = {party for party, each in minted.items() if base64.b64encode(each.secret) in msgspec.json.encode(launch)}
    assert sent == {"decode"}
