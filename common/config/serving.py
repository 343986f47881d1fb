"""Options of the HTTP API and of routing, for the coordinator and for ``tandem up``, which starts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.config.engine import LocalPrefill
from common.config.options import (
    DEADLINE,
    KEY,
    ORIGINS,
    PORT,
    SIZE,
    SWITCH,
    TEXT,
    count,
    decimal,
    one_of,
    option,
    parse_key,
)
from common.config.shared import DEFAULT_CONTROL_PORT
from common.core.errors import StartError
from common.net.hosts import is_loopback
from common.platform.secret_files import read_secret

NoPrefillPolicy = Literal["local", "wait", "reject"]
MetricsAccess = Literal["open", "key"]


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of the HTTP API, its limits and keys, and of routing."""

    host: str = option("127.0.0.1", "address that HTTP listens on", TEXT, "network and keys")
    port: int = option(8000, "port that HTTP listens on (0: a free one)", PORT, "network and keys")
    control_port: int = option(DEFAULT_CONTROL_PORT, "port that workers dial (0: a free one)", PORT, "network and keys")
    chat_template: str | None = option(None, "Jinja file, or template text", TEXT, "model", shown_default="the model's")
    local_prefill: LocalPrefill = option(
        "auto", "prefill on the decode worker: by cost, never, always", one_of("auto", "never", "always"), "routing"
    )
    no_prefill_policy: NoPrefillPolicy = option(
        "local",
        "when no prefill worker is ready: prefill on decode, wait, or answer 503",
        one_of("local", "wait", "reject"),
        "routing",
    )
    failure_timeout: float = option(
        2.0,
        "how long a worker may be silent, or make no progress, before its requests move; workers follow",
        decimal(0.5, 60, "SECONDS"),
        "routing",
    )
    max_queued_requests: int = option(2048, "requests that may wait; more get 429", count(1), "queue")
    max_queued_tokens: int = option(4_000_000, "prompt tokens that may wait; more get 429", count(1), "queue")
    request_timeout: float = option(600.0, "deadline of a request", DEADLINE, "queue")
    client_timeout: float = option(
        30.0, "how long a client may not read, or take to send its body, before it is cut", DEADLINE, "queue"
    )
    max_body_bytes: int = option(8 << 20, "largest request body", SIZE, "queue", shown_default="8MiB")
    api_key: str | None = option(None, "key that clients must send", KEY, "network and keys", secret=True)
    api_key_file: str | None = option(
        None, "file with such keys, one per line, that no other user can read", TEXT, "network and keys"
    )
    admin_api_key: str | None = option(
        None, "key for /admin", KEY, "network and keys", secret=True, shown_default="a client's key"
    )
    insecure_http: bool = option(
        False,
        "listen on other addresses than loopback without a key, and serve pages of every web site",
        SWITCH,
        "network and keys",
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        "origins whose web pages may call this server from a browser; * for all",
        ORIGINS,
        "network and keys",
        shown_default="none",
    )
    metrics_access: MetricsAccess | None = option(
        None,
        "whether /metrics needs a key",
        one_of("open", "key"),
        "network and keys",
        shown_default="open on loopback; elsewhere key if clients need one",
    )
    keys_from_file: tuple[str, ...] = field(default=(), repr=False)
    """The keys in ``api_key_file``. The file is read only once, since it may be a pipe; child processes of ``tandem
    up`` get these keys instead of the file."""

    def __post_init__(self) -> None:
        if self.api_key_file and not self.keys_from_file:
            object.__setattr__(self, "keys_from_file", _keys_in(Path(self.api_key_file)))

    def api_keys(self) -> tuple[str, ...]:
        """Return every key that clients may use, from the flag and from the file."""
        return (*((self.api_key,) if self.api_key else ()), *self.keys_from_file)

    @property
    def metrics_need_a_key(self) -> bool:
        """Whether /metrics needs a key: as configured, else if clients need one and HTTP listens beyond loopback."""
        if self.metrics_access is not None:
            return self.metrics_access == "key"
        return bool(self.api_keys()) and not is_loopback(self.host)

    def _check_http(self) -> None:
        if not (is_loopback(self.host) or self.insecure_http or self.api_keys()):
            raise StartError(
                f"will not listen on {self.host} without a key",
                "anybody who reaches that address could use the model",
                "set --api-key or --api-key-file, or say --insecure-http",
            )
        if self.metrics_access == "key" and not (self.api_keys() or self.admin_api_key):
            raise StartError("--metrics-access key needs a key", "there is none", "set --api-key or --api-key-file")


def _keys_in(path: Path) -> tuple[str, ...]:
    """Read the keys of a file, one per line. Raises StartError if it has none: a file that was emptied by mistake must
    not open the server."""
    try:
        lines = read_secret(path, "--api-key-file").decode().splitlines()
    except UnicodeDecodeError:
        raise StartError(f"cannot read {path}", "it is no UTF-8 text", "correct --api-key-file") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            keys.append(parse_key(line))
        except ValueError:
            raise StartError(f"line {number} of {path} is no key", f"it takes {KEY.expects}", "correct it") from None
    if not keys:
        raise StartError(f"{path} holds no key", "every line is empty or a comment", "add a key")
    return tuple(keys)
