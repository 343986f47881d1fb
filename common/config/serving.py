"""Options of the HTTP API and of routing, for the coordinator and for ``tandem up``, which starts it."""

from __future__ import annotations

import re
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
from common.config.telemetry import TelemetryOptions
from common.core.errors import StartError
from common.net.hosts import is_loopback, is_unspecified
from common.platform.secret_files import read_secret

FLAG_KEY_NAME = "api-key"
"""Name of the key given by ``--api-key``."""
_KEY_NAME = re.compile(r"#\s*name:(.*)")
_SANE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NoPrefillPolicy = Literal["local", "wait", "reject"]
MetricsAccess = Literal["open", "key"]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(TelemetryOptions):
    """Options of the HTTP API, its limits and keys, of routing, and of what is reported about requests."""

    host: str = option("127.0.0.1", "address on which HTTP listens", TEXT, "network and keys")
    port: int = option(8000, "port on which HTTP listens; 0 picks a free one", PORT, "network and keys")
    control_port: int = option(
        DEFAULT_CONTROL_PORT, "port to which workers connect; 0 picks a free one", PORT, "network and keys"
    )
    chat_template: str | None = option(
        None,
        "chat template to use: a Jinja file, or the text of the template",
        TEXT,
        "model",
        shown_default="the model's",
    )
    tool_call_parser: str = option(
        "auto",
        "format in which the model writes tool calls, by its name in vLLM; none: calls are not parsed",
        TEXT,
        "model",
        shown_default="auto: found from the chat template",
    )
    reasoning_parser: str = option(
        "auto",
        "format in which the model writes its reasoning, by its name in vLLM; none: reasoning is not parsed",
        TEXT,
        "model",
        shown_default="auto: found from the chat template",
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "name tokens in log-probabilities by their ids, such as token_id:123; a request's field of this name wins",
        SWITCH,
        "model",
    )
    strict_params: bool = option(
        False,
        "refuse requests with a field that would be ignored, instead of naming it in the header x-tandem-ignored",
        SWITCH,
        "model",
    )
    local_prefill: LocalPrefill = option(
        "auto",
        "whether decode workers prefill prompts themselves: auto (if estimated to be faster), never, or always",
        one_of("auto", "never", "always"),
        "routing",
    )
    no_prefill_policy: NoPrefillPolicy = option(
        "local",
        "what happens while no prefill worker is ready: local (decode workers prefill), wait, or reject "
        "(answer with HTTP 503)",
        one_of("local", "wait", "reject"),
        "routing",
    )
    failure_timeout: float = option(
        2.0,
        "seconds that a worker may be silent, or make no progress, before its requests move to others; "
        "workers derive their own timeouts from it",
        decimal(0.5, 60, "SECONDS"),
        "routing",
    )
    max_queued_requests: int = option(
        2048, "maximum number of waiting requests; further ones get HTTP 429", count(1), "queue"
    )
    max_queued_tokens: int = option(
        4_000_000,
        "maximum number of prompt tokens of all waiting requests; further requests get HTTP 429",
        count(1),
        "queue",
    )
    request_timeout: float = option(
        600.0, "seconds from the arrival of a request to its deadline, at which it fails", DEADLINE, "queue"
    )
    client_timeout: float = option(
        30.0,
        "seconds that a client may take to send its request body, or may stop reading its response, "
        "before it is disconnected",
        DEADLINE,
        "queue",
    )
    max_body_bytes: int = option(
        8 << 20, "maximum size of a request body, in bytes or such as 8MiB", SIZE, "queue", shown_default="8MiB"
    )
    api_key: str | None = option(None, "API key that clients must send", KEY, "network and keys", secret=True)
    api_key_file: str | None = option(
        None,
        "file with API keys for clients, one per line; other users must not be able to read it; '# name: NAME' above a "
        "key names it in /metrics",
        TEXT,
        "network and keys",
    )
    admin_api_key: str | None = option(
        None, "API key for the /admin routes", KEY, "network and keys", secret=True, shown_default="any client's key"
    )
    insecure_http: bool = option(
        False,
        "allow HTTP without an API key on addresses other than loopback, and requests without a key from "
        "web pages of any site",
        SWITCH,
        "network and keys",
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        "origins whose web pages may call this server from a browser, separated by commas; * allows all",
        ORIGINS,
        "network and keys",
        shown_default="none",
    )
    metrics_access: MetricsAccess | None = option(
        None,
        "whether /metrics needs an API key",
        one_of("open", "key"),
        "network and keys",
        shown_default="open on loopback; elsewhere key if clients need an API key",
    )
    keys_from_file: tuple[str, ...] = field(default=(), repr=False)
    """The keys in ``api_key_file``. The file is read only once, since it may be a pipe; child processes of ``tandem
    up`` get these keys instead of the file."""
    key_names: tuple[str, ...] = field(default=(), repr=False)
    """The name of each of ``keys_from_file``."""

    def __post_init__(self) -> None:
        if self.api_key_file and not self.keys_from_file:
            names, keys = zip(*_keys_in(Path(self.api_key_file)), strict=True)
            object.__setattr__(self, "keys_from_file", keys)
            object.__setattr__(self, "key_names", names)

    def api_keys(self) -> tuple[str, ...]:
        """Return every key that clients may use, from the flag and from the file."""
        return tuple(key for _, key in self.named_api_keys())

    def named_api_keys(self) -> tuple[tuple[str, str], ...]:
        """Return (name, key) of every key that clients may use. Several keys may have the same name."""
        flag = ((FLAG_KEY_NAME, self.api_key),) if self.api_key else ()
        return (*flag, *zip(self.key_names, self.keys_from_file, strict=True))

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
                "set --api-key or --api-key-file, or give --insecure-http",
            )
        if self.metrics_access == "key" and not (self.api_keys() or self.admin_api_key):
            raise StartError("--metrics-access key needs a key", "there is none", "set --api-key or --api-key-file")

    def _check_ports(self, control_host: str) -> None:
        together = self.host == control_host or is_unspecified(self.host) or is_unspecified(control_host)
        if together and self.port == self.control_port != 0:
            raise StartError(
                f"--port and --control-port are both {self.port}", "each needs its own", "change one of the two"
            )


def _keys_in(path: Path) -> list[tuple[str, str]]:
    """Read the keys of a file, one per line, each as (name, key). A comment ``# name: NAME`` names the key below it;
    the N-th key of a file is ``key-N`` without one. Raises StartError if there is no key: a file that was emptied by
    mistake must not open the server."""
    try:
        lines = read_secret(path, "--api-key-file").decode().splitlines()
    except UnicodeDecodeError:
        raise StartError(f"cannot read {path}", "it is not UTF-8 text", "correct --api-key-file") from None
    keys: list[tuple[str, str]] = []
    name = ""
    for number, line in enumerate(lines, 1):
        if found := _KEY_NAME.match(line):
            name = found[1].strip()
            if not _SANE_NAME.fullmatch(name):
                raise StartError(
                    f"line {number} of {path} is not a valid name of a key",
                    "a name has 1 to 64 letters, digits and . _ -",
                    "correct it",
                )
        if not line.strip() or line.startswith("#"):
            continue
        try:
            keys.append((name or f"key-{len(keys) + 1}", parse_key(line)))
            name = ""
        except ValueError:
            raise StartError(
                f"line {number} of {path} is not a valid key", f"it takes {KEY.expects}", "correct it"
            ) from None
    if not keys:
        raise StartError(f"{path} holds no key", "every line is empty or a comment", "add a key")
    return keys
