"""Options that several kinds of commands share: model, process, cluster, and the server that a client calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.config.options import (
    KEY,
    SECONDS,
    SWITCH,
    TEXT,
    count,
    one_of,
    option,
    positional,
)
from common.core.errors import StartError
from common.net.hosts import is_loopback
from common.net.keys import ClusterKeys, Party
from common.net.keys import load as load_keys

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
DEFAULT_CONTROL_PORT = 8001
_GGUF = re.compile(r"(?:.*/)?([^/]+?)(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)
MODEL = positional(
    "directory or GGUF file of a checkpoint, or a Hugging Face hub id (owner/name, of GGUF files also "
    "owner/name:TYPE); without it, the built-in model",
    "model",
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and the name under which it is served. An empty ``model`` means the built-in one."""

    model: str = field(metadata=MODEL)
    revision: str | None = option(
        None, "branch, tag or commit of a model from the hub", TEXT, "model", shown_default="main"
    )
    served_model_name: str | None = option(
        None, "model name that clients use in requests", TEXT, "model", shown_default="MODEL as given"
    )
    max_model_len: int | None = option(
        None,
        "maximum length of prompt plus output, in tokens",
        count(1),
        "model",
        shown_default="the model's, limited to what the KV pool holds",
    )
    trust_remote_code: bool = option(False, "allow and run Python code that comes with the model", SWITCH, "model")

    @property
    def served_name(self) -> str:
        """The name that clients see: ``served_model_name``, else the name of a GGUF file, else ``model`` as given."""
        found = _GGUF.fullmatch(self.model)
        return self.served_model_name or (found[1] if found else self.model)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Options of every long-running process."""

    drain_timeout: float = option(
        30.0, "seconds that running requests get to finish when a process stops", SECONDS, "queue"
    )
    log_level: LogLevel = option(
        "info", "minimum severity of log messages", one_of("debug", "info", "warning", "error"), "logs"
    )
    log_format: LogFormat = option(
        "text", "format of log lines: text for people, json for programs", one_of("text", "json"), "logs"
    )
    debug: bool = option(False, "print the traceback if a start fails", SWITCH, "logs")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of processes that may communicate with other machines of a cluster."""

    cluster_key_file: str | None = option(
        None,
        "key file from tandem keygen, with which processes authenticate each other and encrypt; without it, "
        "tandem up makes temporary keys",
        TEXT,
        "network and keys",
    )
    insecure_cluster: bool = option(
        False,
        "use no keys and no encryption on addresses other than loopback: everyone who reaches the ports can join and "
        "read prompts (tandem up always has keys; there it allows --kv-transport nixl on loopback)",
        SWITCH,
        "network and keys",
    )

    def keys_of(self, party: Party) -> ClusterKeys | None:
        """Load the keys of a process of this role, None without ``cluster_key_file``. Raises StartError as
        :func:`common.net.keys.load`."""
        return load_keys(Path(self.cluster_key_file), party) if self.cluster_key_file else None


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of every client of a running server."""

    url: str = option("http://127.0.0.1:8000", "URL of the server", TEXT, "client", aliases=("--base-url",))
    api_key: str | None = option(None, "API key to send", KEY, "client", secret=True)


@dataclass(frozen=True, kw_only=True)
class LabelOption:
    """The label of a measurement, since a client does not know how the server was started."""

    label: str | None = option(
        None, "name of the run, or the server's command, to save with the results", TEXT, "results"
    )


def check_cluster(host: str, flag: str, allowed: bool) -> None:
    """Raise StartError if ``host``, given with ``flag``, is not loopback and plain text is not ``allowed``."""
    if not (is_loopback(host) or allowed):
        raise StartError(
            f"will not use {flag} {host} in plain text",
            "processes would communicate over the network without encryption or authentication",
            "run tandem keygen and give each process --cluster-key-file, or trust the network with --insecure-cluster",
        )
