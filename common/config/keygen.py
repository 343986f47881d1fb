"""Configuration of ``tandem keygen``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.config.options import (
    SWITCH,
    TEXT,
    one_of,
    option,
)
from common.core.errors import StartError
from common.net.keys import PARTIES


@dataclass(frozen=True, kw_only=True)
class KeygenConfig:
    """``tandem keygen``: makes new keys for a cluster, or extracts those that one role needs from a key file."""

    out: str | None = option(
        None, "key file to write", TEXT, "network and keys", shown_default="cluster.key, or ROLE.key"
    )
    role: str | None = option(
        None,
        "write only the keys that this role needs; needs --cluster-key-file",
        one_of(*PARTIES),
        "network and keys",
        shown_default="all roles",
    )
    cluster_key_file: str | None = option(
        None, "key file of the whole cluster, from which --role takes the keys", TEXT, "network and keys"
    )
    overwrite: bool = option(False, "replace the file if it exists", SWITCH, "network and keys")

    def __post_init__(self) -> None:
        if bool(self.role) != bool(self.cluster_key_file):
            raise StartError(
                "--role and --cluster-key-file go together",
                "keys of one role are taken from a file with the keys of all",
                "run tandem keygen first, then tandem keygen --role ROLE --cluster-key-file cluster.key",
            )

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(self.out or f"{self.role or 'cluster'}.key")
