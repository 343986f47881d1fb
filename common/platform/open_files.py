"""The limit of open files of this process; every connection counts as one."""

from __future__ import annotations

import logging
import resource

MOST_FILES = 1 << 16
"""Value to which the limit is raised where permitted: more connections than that are an attack."""
_FEW_FILES = 1024
_MOST_RESERVED = 256
HINT = "raise the limit with ulimit -n, or with LimitNOFILE= in the systemd unit"

log = logging.getLogger("tandem.files")


def raise_limit() -> None:
    """Raise the limit, as servers do, to MOST_FILES or the hard limit if that is lower; warn if the result is low."""
    soft, hard = limit(), _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    wanted = min(hard, MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        soft = wanted
    if soft < _FEW_FILES:
        log.warning("this process may have no more than %d files and connections open: %s", soft, HINT)


def limit() -> int:
    """Return how many files this process may have open at present."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def reserved() -> int:
    """Return how many of them are reserved for uses other than client connections: workers that join, files that are
    read, and connections that are refused because there are too many."""
    return min(_MOST_RESERVED, limit() // 8)


def _number(value: int) -> int:
    return MOST_FILES if value == resource.RLIM_INFINITY else value
