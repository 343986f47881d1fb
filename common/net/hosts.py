"""Names and addresses of machines."""

from __future__ import annotations

import ipaddress
import os


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a socket bound to ``host``, an IP address or a name.

    ``localhost`` is the only name trusted to be loopback: what other names resolve to is up to a name server.
    """
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_unspecified(host: str) -> bool:
    """Return whether ``host`` is a wildcard (0.0.0.0, [::] or *), which a socket can bind but no client can dial."""
    address = _address(host)
    return host == "*" or (address is not None and address.is_unspecified)


def bracketed(host: str) -> str:
    """Return ``host`` as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (an IPv6 host in brackets); raises ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and 0 < int(port) < 65536):
        raise ValueError(text)
    return host, int(port)


def host_id() -> str:
    """Return an id that is equal for processes that can share memory: same boot, same IPC and network namespaces, same
    user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    ipc, net = (os.readlink(f"/proc/self/ns/{space}") for space in ("ipc", "net"))
    return f"{boot}/{ipc}:{net}/{os.getuid()}"


def share_loopback(one: str, other: str) -> bool:
    """Return whether processes with these two :func:`host_id` can reach each other on loopback: same boot, same network
    namespace."""
    return _network(one) == _network(other)


def _network(host_id: str) -> tuple[str, str]:
    boot, _, spaces = host_id.partition("/")
    return boot, spaces.rpartition("/")[0].rpartition("net:")[2]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
