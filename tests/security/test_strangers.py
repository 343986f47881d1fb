"""Unauthorized peers of a running ``tandem up``: another user of the machine, a process without the right key, and one
with a right key that takes the name of a running worker.

The tests as another user need root, because only root can become one; the same attacks without keys, by a process of
this user, run everywhere.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import xxhash

from tests.e2e.system import READY_S, RunningSystem, TandemProcess
from tests.leaked_keys import keygen, new_key, register_cluster_keys
from tests.pace import scaled
from tests.security.outside import own_address

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STRANGER = Path(__file__).with_name("stranger.py")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "wire.json").read_text())
KEY = new_key()
SMALL = ("--num-kv-blocks", "512", "--max-model-len", "512", "--served-model-name", "model")
MOST_CHATS = 60
LOG_EVERY_S = 10.0
_LISTENS = 0x10000
_DIGEST_BYTES = 8
_GREETING_BYTES = 64
"""The part of ZMTP that is sent before the peer is authenticated: signature, version and mechanism."""


# -- what strangers do ------------------------------------------------------------------------------------------------


def hello(**changes: Any) -> bytes:
    """Return the golden Hello of decode-0, with another ``protocol`` version if given."""
    row = msgpack.unpackb(bytes.fromhex(GOLDEN["messages"]["hello"])[_DIGEST_BYTES:])
    row[1] = changes.get("protocol", GOLDEN["protocol"])
    packed = msgpack.packb(row)
    return xxhash.xxh3_64_digest(packed) + packed


def zmtp(message: bytes) -> bytes:
    """Return everything that a ZeroMQ dealer without keys sends, in one piece, whatever the answers are."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x0edecode-0|a|b|c"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    return greeting + bytes([4, len(ready)]) + ready + bytes([2]) + len(message).to_bytes(8, "big") + message


def another_user() -> int:
    """Return the id of another user; skip the test where a process cannot become one."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    return pwd.getpwnam("nobody").pw_uid


def dial(attacks: Sequence[tuple[str, str]], uid: int | None, wait_s: float = 1.5) -> list[dict[str, Any]]:
    """Run stranger.py at sockets (where and how) and return what it received at each. What it sends raw is answered
    within ``wait_s``."""
    say = [[hello(), hello(protocol=GOLDEN["protocol"] + 1)], [zmtp(hello())]]
    incarnation = msgpack.unpackb(bytes.fromhex(GOLDEN["messages"]["hello"])[_DIGEST_BYTES:])[3]
    asked = {"uid": uid, "attacks": attacks, "wait_s": wait_s, "say": [[each.hex() for each in part] for part in say]}
    done = subprocess.run(
        [sys.executable, str(STRANGER)],
        input=json.dumps(asked | {"identity": f"decode-0|{incarnation}|x"}),
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


# -- what is listening ------------------------------------------------------------------------------------------------


def listening(system: RunningSystem) -> dict[str, str]:
    """Return who listens at each address (``unix:NAME`` or ``127.0.0.1:PORT``) of this system: a worker, the
    coordinator, the launcher (``up``) or something else. A Unix datagram socket counts as listening."""
    sockets = sockets_of(system.process)
    http = sockets[system.url.removeprefix("http://")]
    names = {system.process.popen.pid: "up", http: "coordinator"} | {pid: name for name, pid in workers(system).items()}
    return {at: names.get(pid, "something else") for at, pid in sockets.items()}


def sockets_of(process: TandemProcess) -> dict[str, int]:
    """Return the listening process by address."""
    process.look_around()
    inodes: dict[str, int] = {}
    for pid in process.family:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            except FileNotFoundError:
                continue
            if found:
                inodes[found[1]] = pid
    sockets: dict[str, int] = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            listens = words[3] == "0A" or table.startswith("udp")
            if listens and words[9] in inodes:
                sockets[f"127.0.0.1:{int(words[1].rpartition(':')[2], 16)}"] = inodes[words[9]]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        named = len(words) > 7 and (int(words[3], 16) & _LISTENS or words[4] == "0002")
        if named and words[6] in inodes:
            assert words[7].startswith("@"), f"a socket in the file system: {words[7]}"
            sockets[f"unix:{words[7][1:]}"] = inodes[words[6]]
    return sockets


# -- a client ---------------------------------------------------------------------------------------------------------


def ask(system: RunningSystem, path: str, body: Any = None) -> tuple[dict[str, str], Any]:
    """Return headers and JSON body of the answer; AssertionError unless the status is 200."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(system.url + path, data, headers), timeout=scaled(60)
        ) as answer:
            return {name.lower(): value for name, value in answer.headers.items()}, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{error.code}: {error.read()!r}\n{system.process.text}") from error


def workers(system: RunningSystem) -> dict[str, int]:
    """Return the process id of each ready worker, by name."""
    return {each["id"]: each["pid"] for each in ask(system, "/admin/workers")[1]["workers"] if each["state"] == "ready"}


def chat(system: RunningSystem) -> str:
    """Send a chat and return the decode worker that answered."""
    messages = [{"role": "user", "content": f"Hello {time.monotonic_ns()}"}]
    headers, answer = ask(system, "/v1/chat/completions", {"model": "model", "messages": messages, "max_tokens": 4})
    assert answer["choices"][0]["message"]["content"]
    return headers["x-tandem-decode"]


def until(condition: Callable[[], object], process: TandemProcess, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        process.check_alive()
        assert time.monotonic() < deadline, f"{what}:\n{process.text}"
        time.sleep(0.1)


# -- strangers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def spawner() -> None:
    """No spawner: workers are started as an operator starts them, because these tests look at how keys reach child
    processes and what those expose."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """A plain ``tandem up`` with client keys."""
    directory = tmp_path_factory.mktemp("up")
    (directory / "keys").write_text(KEY + "\n")
    (directory / "keys").chmod(0o600)
    words = "up", "--port", "0", "--control-port", "0", *SMALL, "--api-key-file", directory / "keys"
    with RunningSystem.running(directory / "up.log", *words) as running:
        yield running


def test_every_socket_that_listens_is_known(system: RunningSystem) -> None:
    """A new listening socket must be added here, with the way it authenticates peers: HTTP requires a key, control (two
    sockets) and KV use CURVE, and the pool is passed only to processes of the same user, by the kernel's peer
    credentials."""
    found = Counter((label, at.startswith("unix:")) for at, label in listening(system).items())
    known = {("coordinator", False): 2, ("coordinator", True): 1, ("decode-0", False): 1, ("prefill-0", True): 1}
    assert found == known


@pytest.mark.parametrize("who", ["another user", "this user, without a key"])
def test_a_stranger_learns_nothing_and_changes_nothing(system: RunningSystem, who: str) -> None:
    uid = another_user() if who == "another user" else None
    before = workers(system)
    assert set(before) == {"prefill-0", "decode-0"}
    http = system.url.removeprefix("http://")
    sockets = {at: label for at, label in listening(system).items() if at != http}
    attacks = [(at, how) for at in sockets for how in ("raw", "greet", "plain", "curve")]
    if uid is None:  # a process of this user may have the pool
        attacks = [each for each in attacks if sockets[each[0]] != "prefill-0"]
    answers = dial(attacks, uid)
    for (at, how), answer in zip(attacks, answers, strict=True):
        got = b"".join(bytes.fromhex(each) for each in answer["got"])
        where = f"{how} at {at} of {sockets[at]}: {got!r}"
        assert answer["dialled"] and not answer["files"], where
        if how == "raw" and not at.startswith("unix:"):
            assert len(got) <= _GREETING_BYTES and got[:1] in (b"", b"\xff"), where
        elif how == "raw" and uid is None:
            assert len(got) <= _GREETING_BYTES, where
        # on a Unix socket the kernel's peer credentials reject another user first
        elif how == "greet" and (uid is None or not at.startswith("unix:")):
            assert len(got) == _GREETING_BYTES and got[:1] == b"\xff", where
        else:
            assert not got, where
    assert workers(system) == before
    assert chat(system) == "decode-0"
    text = system.process.text
    assert text.count(" joins: ") == 2 and " is refused: " not in text and " is gone" not in text
    reported = [line for line in text.splitlines() if "handshakes that failed at the control port" in line]
    assert reported, "the operator hears of it"
    age_s = time.time() - psutil.Process(system.process.popen.pid).create_time()
    assert len(reported) <= 1 + age_s / LOG_EVERY_S, "a line for all of them, not for each"


def test_a_process_of_this_user_gets_the_pool_and_no_other_does(system: RunningSystem) -> None:
    """Shows that the test above can fail: a process of this user does receive the pool's descriptor."""
    (endpoint,) = (at for at, label in listening(system).items() if label == "prefill-0")
    assert dial([(endpoint, "raw")], None, scaled(20.0))[0]["files"] == 1


# -- keys -------------------------------------------------------------------------------------------------------------


def external(directory: Path, system: RunningSystem, keys: Path, name: str, *flags: str) -> TandemProcess:
    """Start a decode worker that is not a child of the launcher."""
    found = re.search(r"workers at tcp://(\S+)", system.process.text)
    assert found is not None, system.process.text
    words = ["decode", "--coordinator", found[1], "--name", name, "--cluster-key-file", keys, *SMALL, *flags]
    return TandemProcess.start(directory / f"external-{name}.log", *words)


def shown(processes: Sequence[psutil.Process]) -> bytes:
    """Return everything that ``ps`` shows of these processes: command lines and environments."""
    tables = (Path(f"/proc/{each.pid}/{table}") for each in processes for table in ("cmdline", "environ"))
    return b"".join(table.read_bytes() for table in tables)


def test_external_worker_joins_and_cannot_take_used_name(tmp_path: Path) -> None:
    """Two workers not started by the launcher: one with a new name, and one that calls itself decode-0."""
    host, keys = own_address(), keygen(tmp_path / "cluster.key")
    (tmp_path / "keys").write_text(KEY + "\n")
    (tmp_path / "keys").chmod(0o600)
    words = ("up", "--port", "0", "--control-host", host, "--control-port", "0", *SMALL)
    words += ("--cluster-key-file", str(keys), "--api-key-file", str(tmp_path / "keys"), "--local-prefill", "never")
    started: list[TandemProcess] = []
    with RunningSystem.running(tmp_path / "up.log", *words) as system:
        try:
            before = workers(system)
            assert set(before) == {"prefill-0", "decode-0"}
            started += [external(tmp_path, system, keys, name, "--host", host) for name in ("decode-0", "decode-9")]
            thief, guest = started
            until(lambda: "decode-9" in workers(system), guest, "the guest joins")
            until(lambda: "give every worker a name of its own" in thief.text, thief, "the other one is refused")
            assert workers(system) == before | {"decode-9": guest.popen.pid}
            served: set[str] = set()
            with ThreadPoolExecutor(4) as pool:
                for _ in range(MOST_CHATS // 4):
                    served |= set(pool.map(lambda _: chat(system), range(4)))
                    if served >= {"decode-0", "decode-9"}:
                        break
            assert served == {"decode-0", "decode-9"}, "prompts are handed over to both"
            thief.check_alive()
            assert "joined the coordinator" not in thief.text, "it goes on asking"
            outside = [each.popen.pid for each in started]
            text = shown([psutil.Process(pid) for pid in (*system.process.family, *outside)])
            assert not [secret for secret in register_cluster_keys(keys) if secret.encode() in text]
            psutil.Process(before["decode-0"]).kill()
            until(lambda: workers(system).get("decode-0") not in (None, before["decode-0"]), thief, "its name is free")
        finally:
            for process in started:
                process.kill()
