"""Options that several kinds of commands share: model, process, cluster, and the server that a client calls."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and the name under which it is served. An empty ``model`` means the built-in one."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )
    revision: str | None = option(None, "branch, tag or commit of a hub model", TEXT, "model", shown_default="main")
    served_model_name: str | None = option(
        None, "name that clients use for the model", TEXT, "model", shown_default="MODEL as given"
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output, in tokens",
        count(1),
        "model",
        shown_default="the model's, cut to what the KV pool holds",
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model", SWITCH, "model")

    @property
    def served_name(self) -> str:
        """The name that clients see: ``served_model_name``, else ``model`` as given."""
        return self.served_model_name or self.model


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Options of every long-running process."""

    drain_timeout: float = option(30.0, "how long running requests may take to finish at a stop", SECONDS, "queue")
    log_level: LogLevel = option(
        "info", "least severity that is logged", one_of("debug", "info", "warning", "error"), "logs"
    )
    log_format: LogFormat = option("text", "log lines for people or for programs", one_of("text", "json"), "logs")
    debug: bool = option(False, "show tracebacks of failed starts", SWITCH, "logs")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of processes that may communicate with other machines of a cluster."""

    cluster_key_file: str | None = option(
        None, "file of tandem keygen: the parts know each other by its keys and encrypt", TEXT, "network and keys"
    )
    insecure_cluster: bool = option(
        False,
        "let the parts talk in plain text over other addresses than loopback (tandem up: over NIXL on loopback)",
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

    url: str = option("http://127.0.0.1:8000", "the server", TEXT, "client", aliases=("--base-url",))
    api_key: str | None = option(None, "key to send", KEY, "client", secret=True)


@dataclass(frozen=True, kw_only=True)
class LabelOption:
    """The label of a measurement, since a client does not know how the server was started."""

    label: str | None = option(
        None, "name of the run, or the server's command, saved with the figures", TEXT, "results"
    )


def check_cluster(host: str, flag: str, allowed: bool) -> None:
    """Raise StartError if ``host``, given with ``flag``, is not loopback and plain text is not ``allowed``."""
    if not (is_loopback(host) or allowed):
        raise StartError(
            f"will not use {flag} {host} in plain text",
            "the parts would talk over the network without encryption or keys",
            "run tandem keygen and give each part --cluster-key-file, or trust the network with --insecure-cluster",
        )
