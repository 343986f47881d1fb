"""The keys of a cluster: one CURVE key pair per role. They are kept in a file that only its owner can read, or minted
by a launcher for its child processes and never written to disk.

A key *is* a role: a peer that proves to hold the prefill key is a prefill worker and nothing else. The file written by
`tandem keygen` holds the secrets of all roles and can be copied to every host. A file made with ``--role`` holds the
secret of that role and the public keys of the others, so that a compromised host gives away only one role.

Knows files, not sockets; :mod:`common.net.sockets` uses the keys.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from common.core.errors import StartError, reason
from common.platform.secret_files import read_secret

Party = Literal["coordinator", "prefill", "decode", "colocated"]
PARTIES: tuple[Party, ...] = get_args(Party)
_FORMAT = "tandem_cluster_keys"
_VERSION = 1
_KEY_CHARACTERS = 40


@dataclass(frozen=True)
class ClusterKeys:
    """The keys of one process: the secret key of its own role and the public keys of all roles (Z85, 40 characters)."""

    party: Party
    secret: bytes
    public: dict[Party, bytes]

    def __repr__(self) -> str:
        return f"ClusterKeys({self.party})"

    def party_of(self, public: str | None) -> Party | None:
        """Return the role that has this public key (Z85), or None."""
        return next((party for party, key in self.public.items() if key.decode() == public), None)


def mint() -> dict[Party, ClusterKeys]:
    """Create new keys for every role, in memory."""
    import zmq  # here, so that only processes with keys pay for the import

    pairs = {party: zmq.curve_keypair() for party in PARTIES}
    public = {party: shown for party, (shown, _) in pairs.items()}
    return {party: ClusterKeys(party, secret, public) for party, (_, secret) in pairs.items()}


def make(path: Path, *, overwrite: bool = False) -> None:
    """Write a file with new keys for every role, mode 0600. Raises StartError if it exists and not ``overwrite``, or if
    it cannot be written."""
    minted = mint()
    public = {party: key.decode() for party, key in minted["coordinator"].public.items()}
    _write(path, public, {party: keys.secret.decode() for party, keys in minted.items()}, overwrite)


def narrow(source: Path, party: Party, path: Path, *, overwrite: bool = False) -> None:
    """Write to ``path`` the part of the key file ``source`` that a host needs to run only role ``party``. Raises
    StartError as :func:`make` and :func:`load`."""
    public, secret = _read(source)
    if party not in secret:
        raise StartError(
            f"{source} has no secret of {party}",
            "it was made for another role",
            "give the file with the keys of all roles",
        )
    _write(path, public, {party: secret[party]}, overwrite)


def load(path: Path, party: Party) -> ClusterKeys:
    """Load the keys of a process with role ``party``. Raises StartError if other users can read the file, or if it is
    not a key file with that role's secret."""
    import zmq

    public, secret = _read(path)
    if party not in secret:
        raise StartError(
            f"{path} cannot be used by a {party} process",
            f"it holds the secret key of {', '.join(secret)} only",
            f"give {party}.key, made by tandem keygen --role {party} --cluster-key-file CLUSTER-KEY-FILE, or the file "
            "of all roles itself, as tandem up needs",
        )
    if zmq.curve_public(secret[party].encode()) != public[party].encode():
        raise _strange(path, f"the public and the secret key of {party} do not match")
    return ClusterKeys(party, secret[party].encode(), {each: key.encode() for each, key in public.items()})


def _read(path: Path) -> tuple[dict[Party, str], dict[Party, str]]:
    """Read a key file; return its public and its secret keys by role."""
    text = read_secret(path, "--cluster-key-file, or run tandem keygen")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _strange(path, "it is not JSON") from error
    if not isinstance(content, dict) or content.get(_FORMAT) != _VERSION:
        raise _strange(path, f'"{_FORMAT}": {_VERSION} is missing')
    public, secret = _keys(path, content.get("public")), _keys(path, content.get("secret"))
    if set(public) != set(PARTIES) or len(set(public.values())) != len(PARTIES) or not secret:
        raise _strange(path, "it must have a different public key for every role, and at least one secret key")
    return public, secret


def _keys(path: Path, found: Any) -> dict[Party, str]:
    import zmq.utils.z85

    if not isinstance(found, dict):
        raise _strange(path, "keys are missing")
    for party, key in found.items():
        try:
            good = party in PARTIES and len(key) == _KEY_CHARACTERS and len(zmq.utils.z85.decode(key)) == 32
        except Exception:  # the decoder raises various errors for characters outside of Z85
            good = False
        if not good:
            raise _strange(
                path, f"the key of {party} is not valid" if party in PARTIES else "a key has an unknown role"
            )
    return found


def _strange(path: Path, why: str) -> StartError:
    return StartError(f"{path} is not a file of cluster keys", why, "make one with: tandem keygen")


def _write(path: Path, public: dict[Party, str], secret: dict[Party, str], overwrite: bool) -> None:
    """Write a key file atomically; it is never readable by other users, not even while it is written."""
    text = json.dumps({_FORMAT: _VERSION, "public": public, "secret": secret}, indent=2) + "\n"
    try:
        number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(number, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError as error:
        raise StartError(
            f"will not overwrite {path}",
            "processes that use these keys could not connect to processes with new ones",
            "choose another --out, or give --overwrite",
        ) from error
    except OSError as error:
        raise StartError(f"cannot write {path}", reason(error), "choose another --out") from error
