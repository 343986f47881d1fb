"""Keeps packed weights in files that workers of one machine map: they share the pages, and need not convert again.

A file is written once, by the first worker that needs it: tensors one after another, an index as JSON with a hash of
the tensors, and the index's length. It is mapped privately, and nothing writes to it any more. Its name has a hash of
all bytes of the checkpoint's weights. The least recently used files are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from common.checkpoint.cache_root import cache_root
from common.quantization.panels import Panels
from common.quantization.weight import QuantizedWeight

LIMIT_BYTES = 20 << 30
"""Most bytes of all files; half of the free disk if that is less."""
SUFFIX = ".tandem"
_ALIGNED, _ABANDONED_S = 64, 86_400
_TYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32)
}

log = logging.getLogger("tandem.cache")


@dataclass(frozen=True)
class Entry:
    """The ``weight`` of a module: of its parameter ``part`` and the expert ``expert`` if it holds experts. Entries of
    one expert that follow each other are joined along their rows."""

    module: str
    weight: QuantizedWeight | Panels
    part: str = ""
    expert: int = 0


@dataclass(frozen=True)
class Packed:
    """Packed weights in their order. ``notes``: what was not kept as it is in the checkpoint."""

    entries: list[Entry]
    notes: list[str]


def kept(key: str, read: Callable[[], Iterable[Entry]], notes: Callable[[], list[str]], need: int) -> Packed | None:
    """Return the weights of ``key`` mapped from a file, which is written from ``read`` if it is not there; None if it
    cannot be. ``need``: about how many bytes it takes. ``notes`` is called when all weights have been read. Of several
    processes that ask at once, one writes and the others wait. Exceptions of ``read`` are raised."""
    name = xxhash.xxh3_128_hexdigest(f"{_code()}|{key}".encode())
    try:
        root = cache_root() / "weights"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = root / f"{name}{SUFFIX}"
        with (root / f"{name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if file.is_file() and (found := _mapped(file)) is not None:
                os.utime(file)
                return found
            for left in root.glob(f"{_unfinished(file)}*"):  # by a process that was killed: this one has the lock
                left.unlink(missing_ok=True)
            if need > _room(root):
                log.warning("%s has too little room for packed weights: each worker has its own", root)
                return None
            _write(file, read(), notes)
            return _mapped(file)
    except OSError as error:
        log.warning("packed weights cannot be kept (%s): each worker has its own", error)
        return None


@functools.cache
def _code() -> str:
    """Return a hash of the code that makes packed weights: a new version of it makes new files."""
    digest = xxhash.xxh3_64()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return str(digest.hexdigest())


def _write(file: Path, entries: Iterable[Entry], notes: Callable[[], list[str]]) -> None:
    """Write the weights under another name, and rename the file when it is whole."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=_unfinished(file)) as out:
        index = [_append(out.file, entry) for entry in entries]  # type: ignore[arg-type]
        out.flush()
        with mmap.mmap(out.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as pages:
            text = json.dumps({"entries": index, "notes": notes(), "hash": _hash(pages, len(pages))}).encode()
        out.write(text + len(text).to_bytes(8, "little"))
        out.flush()
        os.fsync(out.fileno())  # a crash of the machine must not leave a whole name for half a file
        os.link(out.name, f"{out.name}-whole")
        Path(f"{out.name}-whole").replace(file)


def _unfinished(file: Path) -> str:
    """Return how the names of files begin that are to become ``file``."""
    return f".new-{file.stem}-"


def _hash(pages: mmap.mmap, size: int) -> str:
    """Return a hash of the first ``size`` bytes."""
    with memoryview(pages) as view, view[:size] as tensors:
        return str(xxhash.xxh3_64_hexdigest(tensors))


def _append(out: BinaryIO, entry: Entry) -> dict[str, Any]:
    """Write one weight; return its entry in the index."""
    panels = entry.weight if isinstance(entry.weight, Panels) else Panels.of(entry.weight)
    tensors: dict[str, Any] = {}
    for name, tensor in panels.state().items():
        out.write(bytes(-out.tell() % _ALIGNED))
        tensors[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), out.tell()]
        out.write(tensor.contiguous().view(torch.uint8).flatten().numpy().data)
    place = {"module": entry.module, "part": entry.part, "expert": entry.expert}
    return {**place, "shape": list(panels.shape), "stated": panels.stated, "tensors": tensors}


def _mapped(file: Path) -> Packed | None:
    """Map a file; None, and the file is removed, if it is damaged."""
    try:
        with file.open("rb") as opened:
            pages = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        size = int.from_bytes(pages[-8:], "little")
        index = json.loads(pages[-8 - size : -8])
        if index["hash"] != _hash(pages, len(pages) - 8 - size):
            raise ValueError
        return Packed([_entry(pages, each) for each in index["entries"]], index["notes"])
    except (ValueError, KeyError, TypeError, RuntimeError):
        file.unlink()
        return None


def _entry(pages: mmap.mmap, found: dict[str, Any]) -> Entry:
    state = {}
    for name, (kind, shape, offset) in found["tensors"].items():
        count = torch.Size(shape).numel()
        state[name] = torch.frombuffer(pages, dtype=_TYPES[kind], count=count, offset=offset).view(shape)
    rows, columns = found["shape"]
    panels = Panels.of_state((rows, columns), found["stated"], state)
    return Entry(found["module"], panels, found["part"], found["expert"])


def _room(root: Path) -> int:
    """Return how many bytes a new file may have, once others were removed for it, the least recently used first."""
    for left in root.glob(".new-*"):  # by a process that was killed, of a model that is not served any more
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _ABANDONED_S:
                left.unlink()
    files = sorted((file.stat().st_mtime, file) for file in root.glob(f"*{SUFFIX}"))
    used = sum(file.stat().st_size for _, file in files)
    limit = min(LIMIT_BYTES, used + shutil.disk_usage(root).free // 2)
    for _, file in files:
        if used <= limit // 2:
            break
        used -= file.stat().st_size
        with contextlib.suppress(OSError):
            file.unlink()
    return limit - used
