"""``tandem status`` says whether the server is ready, and what its workers and links are like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.config.status import StatusConfig
from deploy.cli import status
from deploy.running_system import Answers


def worker(name: str, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "id": name, "role": name.partition("-")[0], "state": "ready", "host": "a", "device": "cpu", "model": "tiny",
        "kv_blocks": {"total": 100, "free": 70, "cached": 10, "held": 20}, "block_size": 16, "running": 2, "waiting": 1,
        "heard_ms": 40, "turn_ms": 3, "links": [], "transports": ["shm"], "avoids": [], "gpus": [],
    }  # fmt: skip
    return known | changes


def link(to: str) -> dict[str, Any]:
    return {"to": to, "transport": "shm", "gb_per_s": 0.05, "latency_us": 300.0}


def shown(
    *workers: dict[str, Any],
    not_ready: str = "",
    absent: tuple[dict[str, Any], ...] = (),
    expected: dict[str, int] | None = None,
    model: str = "tiny",
) -> list[str]:
    answers = Answers("1.0", not_ready, workers, absent, model, expected or {})
    return list(status.lines("http://user:secret@here:1", answers))


def test_a_ready_system() -> None:
    lines = shown(worker("prefill-0", links=[link("decode-0")]), worker("decode-0"))
    assert lines[:2] == ["tandem 1.0 at http://here:1 serves tiny: ready", ""]
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "worker role state device KV in use running waiting",
        "prefill-0 prefill ready cpu 20% of 1,600 tokens, 10% cached 2 1",
        "decode-0 decode ready cpu 20% of 1,600 tokens, 10% cached 2 1",
        "prefill-0 to decode-0: shm, 50.0 MB/s, 300 µs",
    ]


def test_what_is_wrong_gets_a_line() -> None:
    lines = shown(
        worker("prefill-0", heard_ms=2400, avoids=["decode-0"]),
        worker("decode-0", host="b", turn_ms=1500),
        not_ready="No decode worker is ready.",
        absent=({"id": "decode-1", "why": "exited", "for_s": 3.0, "restart_in_s": 2.0},),
    )
    assert lines[0].endswith("serves tiny: not ready: No decode worker is ready.")
    assert lines[2].split()[:3] == ["worker", "host", "role"] and lines[4].split()[:2] == ["decode-0", "b"]
    assert lines[5:] == [
        "prefill-0 is silent for 2.4 s",
        "prefill-0 hands over to decode-0 only to try: hand-offs failed lately",
        "decode-0: its present step takes 1.5 s so far",
        "decode-1 is absent for 3 s: exited, restarted in 2 s",
    ]


def test_pools_without_a_worker_are_named() -> None:
    pools = {"prefill": 1, "decode": 2, "colocated": 0}
    gone = {"id": "decode-1", "why": "it exited", "for_s": 3.0, "restart_in_s": 0.0}
    why = "No decode worker is ready."
    lines = shown(worker("prefill-0"), not_ready=why, absent=(gone,), expected=pools)
    assert lines[0].endswith(f" serves tiny: not ready: {why}")
    assert lines[4:] == ["the decode pool has no worker", "decode-1 is absent for 3 s: it exited, being restarted"]
    assert shown(not_ready=why, expected=pools)[2:] == [
        "the prefill pool has no worker",
        "the decode pool has no worker",
    ]
    assert shown(worker("decode-0"), expected={"prefill": 0, "decode": 1})[4:] == [], "it prefills locally"
    assert shown(worker("colocated-0"), not_ready=why)[4:] == []


def test_an_older_server_without_workers() -> None:
    """It names neither its model nor the sizes of its pools."""
    lines = shown(not_ready="No decode worker is ready.", model="")
    assert lines[0] == "tandem 1.0 at http://here:1: not ready: No decode worker is ready."
    assert lines[2:] == ["the prefill pool has no worker", "the decode pool has no worker"]
    assert shown(worker("decode-0"))[4:] == [], "nothing says that it should have a prefill worker"


def test_many_links_are_not_all_listed() -> None:
    decodes = [worker(f"decode-{at}") for at in range(12)]
    lines = shown(worker("prefill-0", links=[link(each["id"]) for each in decodes]), *decodes)
    assert sum("50.0 MB/s" in line for line in lines) == status.MOST_LINKS and lines[-1].startswith("and 4 more links")


@pytest.mark.parametrize(("not_ready", "absent", "code"), [("", 0, 0), ("no", 0, 1), ("", 1, 1)])
def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], not_ready: str, absent: int, code: int
) -> None:
    gone = {"id": "decode-1", "why": "exited", "for_s": 3.0, "restart_in_s": None}
    answers = Answers("1.0", not_ready, [worker("decode-0")], [gone] * absent, "tiny")
    monkeypatch.setattr(status, "ask", lambda *_: answers)
    assert status.run(StatusConfig(json=True)) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["ready"], found["model"], len(found["absent"])) == (not not_ready, "tiny", absent)
    assert found["workers"][0]["id"] == "decode-0"
    assert status.run(StatusConfig()) == code
