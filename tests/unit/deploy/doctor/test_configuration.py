"""The checks of a configuration: ports, keys and the checkpoint, as ``tandem up`` would refuse or accept them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from common.config.doctor import DoctorConfig, parse_workload
from common.net import keys
from deploy.doctor import configuration
from deploy.doctor.finding import Finding
from tests.leaked_keys import new_key


def config(**changes: Any) -> DoctorConfig:
    return DoctorConfig(**{"model": ""} | changes)


def found(findings: Any) -> list[tuple[str, str]]:
    def shown(each: Finding) -> tuple[str, str]:
        assert each.do or each.level == "good"
        return each.level, each.text

    return [shown(each) for each in findings]


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = found(configuration.ports(config(port=port, control_port=0)))
        assert first[0] == "bad" and f"cannot listen on 127.0.0.1:{port}" in first[1]
        assert second == ("good", "--control-port 0: the kernel picks a free one")
        monkeypatch.setattr(configuration, "is_tandem", lambda _: True)
        first, _ = found(configuration.ports(config(port=port, control_port=0)))
        assert first == ("good", f"{port} (--port) is used by a running Tandem")
    monkeypatch.setattr(configuration, "is_tandem", lambda _: False)
    monkeypatch.setattr(configuration, "ephemeral_ports", lambda: (port, port))
    free, warned, _ = found(configuration.ports(config(port=port, control_port=0)))
    assert free == ("good", f"{port} (--port) is free") and warned[0] == "warning"
    away = found(configuration.ports(config(host="192.0.2.1", port=1, control_port=0)))
    assert away[0][0] == "bad" and "192.0.2.1" in away[0][1]


def test_addresses_that_would_be_refused() -> None:
    assert found(configuration.addresses(config()))[0][0] == "good"
    assert found(configuration.addresses(config(host="0.0.0.0")))[0][0] == "bad"
    assert found(configuration.addresses(config(host="0.0.0.0", api_key=new_key())))[0][0] == "good"


def test_cluster_keys(tmp_path: Path) -> None:
    path, decode = tmp_path / "cluster.key", tmp_path / "decode.key"
    keys.make(path)
    keys.narrow(path, "decode", decode)
    assert "secrets of all roles, private" in found(configuration.keys(config(cluster_key_file=str(path))))[0][1]
    assert "secrets of decode, private" in found(configuration.keys(config(cluster_key_file=str(decode))))[0][1]
    path.chmod(0o644)
    level, text = found(configuration.keys(config(cluster_key_file=str(path))))[0]
    assert level == "bad" and "other users can read or write it" in text
    decode.write_text("{}")
    level, text = found(configuration.keys(config(cluster_key_file=str(decode))))[0]
    assert level == "bad" and "not a file of cluster keys" in text


def test_api_keys(tmp_path: Path) -> None:
    key, path = new_key(), tmp_path / "keys.txt"
    path.touch(0o600)
    path.write_text(f"{key}\n{new_key()}\n")
    texts = found(configuration.keys(config(api_key_file=str(path), host="0.0.0.0", admin_api_key=new_key())))
    assert ("good", f"{path}: 2 keys for clients, private") in texts and not any(key in text for _, text in texts)
    assert [level for level, _ in texts] == ["good", "good"]
    same = found(configuration.keys(config(api_key=key, admin_api_key=key)))
    assert ("bad", "the admin key is also a client's key") in same
    openly = found(configuration.keys(config(api_key=key, host="0.0.0.0")))
    assert [level for level, text in openly if "every client may use /admin" in text] == ["warning"]
    short = found(configuration.keys(config(api_key=new_key()[:9])))
    assert [level for level, text in short if "can be guessed" in text] == ["warning"]


def test_the_checkpoint_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = found(configuration.checkpoint(config(), []))
    assert [level for level, _ in texts] == ["good", "good"]
    assert texts[0][1].startswith("tandem-builtin: LlamaForCausalLM, ") and "million parameters" in texts[0][1]
    assert texts[1][1].startswith("2 workers of ")
    texts = found(configuration.checkpoint(config(kv_cache_memory=1 << 50), []))
    assert texts[-1][0] == "bad" and "cannot allocate" in texts[-1][1]


def test_room_for_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        file_bytes = 1 << 20

    monkeypatch.setattr(configuration, "_hub_cache", lambda: tmp_path / "not" / "there")
    assert found(configuration._download(Found()))[0][0] == "good"  # type: ignore[arg-type]
    Found.file_bytes = 1 << 60
    assert found(configuration._download(Found()))[0][0] == "bad"  # type: ignore[arg-type]


def test_where_packed_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "new"))
    assert found(configuration.cache(config()))[0][0] == "good" and not (tmp_path / "new").exists()
    assert found(configuration.cache(config(weight_cache="none"))) == []
    (tmp_path / "file").touch()
    for unusable in ("/proc/1/nowhere", str(tmp_path / "file"), str(tmp_path / "file" / "folder")):
        monkeypatch.setenv("TANDEM_CACHE", unusable)
        assert found(configuration.cache(config()))[0][0] == "warning", unusable


@pytest.mark.parametrize(
    ("text", "shape"), [("1024:128@2", (1024, 128, 2.0)), ("4k:1K@0.5", (4000, 1024, 0.5)), (" 1:1@1 ", (1, 1, 1.0))]
)
def test_a_workload(text: str, shape: tuple[int, int, float]) -> None:
    assert parse_workload(text) == shape


@pytest.mark.parametrize("text", ["", "1024", "1024:128", "0:1@1", "1:0@1", "1:1@0", "1:1@-1", "a:b@c", "1:1@1e9999"])
def test_no_workload(text: str) -> None:
    with pytest.raises(ValueError):
        parse_workload(text)


def test_the_server_of_a_configuration() -> None:
    assert config().server_url == "http://127.0.0.1:8000"
    assert config(host="0.0.0.0", port=1, api_key=new_key()).server_url == "http://127.0.0.1:1"
    assert config(host="::1").server_url == "http://[::1]:8000"
    assert config(url="http://b:1").server_url == "http://b:1"
