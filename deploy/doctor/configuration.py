"""Checks of a configuration of ``tandem up``: addresses, ports, keys, and the checkpoint with its memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.builtin import NAME, path, smollm2
from common.checkpoint.cache_root import configured_root
from common.checkpoint.files import open_checkpoint
from common.checkpoint.preview import preview
from common.config.up import UpConfig
from common.core.errors import StartError, reason
from common.kv.budget import human_bytes
from common.net.hosts import is_loopback
from common.net.http_client import HttpClient
from common.net.keys import PARTIES, load
from common.platform.gpu import Gpu
from deploy.doctor.finding import Finding, bad, good, refused, warning
from deploy.launcher import fleet
from deploy.launcher.inspection import Inspection, inspect
from deploy.launcher.preflight import check_memory, claim_port

SHORT_KEY = 16
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


# -- addresses and ports ----------------------------------------------------------------------------------------------


def addresses(config: UpConfig) -> Iterator[Finding]:
    """Yield whether the configuration may listen where it wants to."""
    try:
        config.check_binds()
    except StartError as error:
        yield refused("addresses", error)
    else:
        open_to = "this machine only" if is_loopback(config.host) else "clients of other machines"
        workers = "" if is_loopback(config.control_host) else ", and workers of other machines can join"
        yield good("addresses", f"HTTP on {config.host} for {open_to}{workers}")


def ports(config: UpConfig) -> Iterator[Finding]:
    """Yield whether both ports are free, or in use by a running Tandem."""
    wanted = (("--port", config.host, config.port), ("--control-port", config.control_host, config.control_port))
    ours = is_tandem(f"http://127.0.0.1:{config.port}") if config.port else False
    for flag, host, port in wanted:
        if port == 0:
            yield good("ports", f"{flag} 0: the kernel picks a free one")
            continue
        try:
            claim_port(host, port, flag).close()
        except StartError as error:
            if ours:
                yield good("ports", f"{port} ({flag}) is used by a running Tandem")
            else:
                yield refused("ports", error)
            continue
        yield good("ports", f"{port} ({flag}) is free")
        low, high = ephemeral_ports()
        if low <= port <= high:
            yield warning(
                "ports",
                f"{port} is one of those that the kernel gives to any connection ({low} to {high})",
                f"choose another with {flag}, or reserve it with sysctl net.ipv4.ip_local_reserved_ports",
            )


def ephemeral_ports() -> tuple[int, int]:
    """Return the range of ports that the kernel chooses from; (1, 0) if it does not say."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return 1, 0
    return low, high


def is_tandem(url: str) -> bool:
    """Return whether a Tandem server answers at ``url``."""
    try:
        status, body = HttpClient(url, timeout_s=2.0).get("/health")
    except (OSError, StartError):
        return False
    return status == 200 and isinstance(body, dict) and body.get("status") == "ok"


# -- keys -------------------------------------------------------------------------------------------------------------


def keys(config: UpConfig) -> Iterator[Finding]:
    """Yield whether key files are private and complete, and whether clients could use the admin endpoints. The keys
    themselves are never shown."""
    yield from _cluster_keys(config)
    clients = config.api_keys()
    if config.api_key_file:
        yield good("keys", f"{config.api_key_file}: {len(config.keys_from_file)} keys for clients, private")
    short = sum(len(key) < SHORT_KEY for key in (*clients, *((config.admin_api_key,) if config.admin_api_key else ())))
    if short:
        yield warning(
            "keys",
            f"{short} of the API keys have fewer than {SHORT_KEY} characters: they can be guessed",
            'python3 -c "import secrets; print(secrets.token_urlsafe())"',
        )
    if config.admin_api_key in clients and config.admin_api_key:
        yield bad("keys", "the admin key is also a client's key", "give /admin a key of its own: --admin-api-key")
    elif not is_loopback(config.host) and not config.admin_api_key:
        yield warning(
            "keys",
            "every client may use /admin: drain and scale workers, read prompts' sizes",
            "give /admin a key of its own: --admin-api-key or TANDEM_ADMIN_API_KEY",
        )
    if not clients and is_loopback(config.host):
        yield good("keys", "clients of this machine need no key")


def _cluster_keys(config: UpConfig) -> Iterator[Finding]:
    if not config.cluster_key_file:
        yield good("keys", "no cluster key file: tandem up makes temporary keys; other hosts need tandem keygen")
        return
    file, held, refusal = Path(config.cluster_key_file), list[str](), None
    for party in PARTIES:
        try:
            load(file, party)
        except StartError as error:
            refusal = error
        else:
            held.append(party)
    if not held:
        assert refusal is not None
        yield refused("keys", refusal)
    else:
        roles = "all roles" if len(held) == len(PARTIES) else ", ".join(held)
        more = "; a host that runs one role needs only that one's" if len(held) == len(PARTIES) else ""
        yield good("keys", f"{file}: secrets of {roles}, private{more}")


# -- the checkpoint ---------------------------------------------------------------------------------------------------


def checkpoint(config: UpConfig, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield whether the model can be served, and whether its workers fit into memory."""
    model = smollm2.resolved(config.model) or str(path())
    found = inspect(preview(model, config.revision, config.trust_remote_code), config.max_model_len)
    name = config.model or NAME
    large = found.parameters >= 1e9
    parameters = f"{found.parameters / (1e9 if large else 1e6):.3g} {'billion' if large else 'million'} parameters"
    yield good(
        "checkpoint",
        f"{name}: {found.architecture}, {parameters}, {found.format}, computed in {found.dtype} on "
        f"{found.device}, context {found.context:,} tokens",
    )
    for text in found.slow:
        yield warning("checkpoint", text, "tandem inspect MODEL says what is fast and what is slow")
    if not found.end_tokens:
        yield warning("checkpoint", "it has no end token: answers run to their limit", "set max_tokens in requests")
    if not found.chat_templates:
        yield warning("checkpoint", "it has no chat template: /v1/chat/completions is refused", "--chat-template FILE")
    if not found.downloaded:
        yield from _download(found)
        return
    members = fleet.plan(config, gpus)
    try:
        check_memory(
            open_checkpoint(model, config.revision, config.trust_remote_code), config, len(members),
            [member.place for member in members],
        )  # fmt: skip
    except StartError as error:
        yield refused("checkpoint", error)
    else:
        count = f"{len(members)} worker{'s' if len(members) > 1 else ''}"
        yield good(
            "checkpoint",
            f"{count} of {human_bytes(found.weight_bytes)} of weights and their KV fit into "
            f"{human_bytes(found.free_bytes)} of free memory",
        )


def _download(found: Inspection) -> Iterator[Finding]:
    """Yield whether there is room for a model that is not downloaded yet."""
    folder = _existing(_hub_cache())
    free = shutil.disk_usage(folder).free
    text = f"not downloaded: {human_bytes(found.file_bytes)}, and {human_bytes(free)} are free in {folder}"
    if free < found.file_bytes:
        yield bad("checkpoint", text, "free some space, or set HF_HOME to another disk")
    else:
        yield good("checkpoint", text)


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cache(config: UpConfig) -> Iterator[Finding]:
    """Yield whether packed weights can be kept: quantized models are packed again at every start otherwise."""
    if config.weight_cache == "none":
        return
    folder = configured_root()
    there = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions alone do not show what a file system refuses
            pass
    except OSError as error:
        yield warning(
            "cache",
            f"{folder} cannot be written ({reason(error)}): quantized weights are packed again at every start",
            "set TANDEM_CACHE to a folder of yours",
        )
    else:
        yield good("cache", f"{human_bytes(shutil.disk_usage(there).free)} free for packed weights in {folder}")


def _existing(folder: Path) -> Path:
    """Return ``folder``, or the first folder above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
