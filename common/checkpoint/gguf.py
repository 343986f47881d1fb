"""Opens GGUF files: metadata, and where each tensor lies in which shard.

The gguf package reads the container, with two changes: arrays are read at once, where it makes an object per element
(seconds for a vocabulary), and every length is checked against the end of the file before anything is allocated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import GGUFReader, ReaderField

from common.checkpoint.values import check_count, check_number
from common.checkpoint.weights import LFS
from common.core.errors import StartError

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MOST_DIMENSIONS = 4
_DAMAGED = "download the file again"
_BYTE_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
_VERSIONS = (2, 3)
_UNLIKELY = 100
"""Version from which on a file is taken to be damaged."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file: its name, ggml type, shape (rows first), and the place of its blocks."""

    name: str
    type: int
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The blocks of the tensor as bytes, mapped from the file: copy before computing, the file may change."""
        return np.memmap(self.file, mode="r", offset=self.offset, shape=(self.nbytes,), dtype=np.uint8)


@dataclass(frozen=True)
class GgufModel:
    """A model in one GGUF file or several shards. ``header``: the bytes before the tensor data of all shards, which
    hold the metadata and the table of tensors."""

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    files: tuple[Path, ...]
    header: bytes

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return the value of ``ARCHITECTURE.key``. Raises StartError if the file has none."""
        value = self.get(key)
        if value is None:
            raise StartError(f"cannot read {self.files[0]}", f"it has no {self.architecture}.{key}", _DAMAGED)
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least ``least``. Raises StartError if it is none, or absent without
        ``default``."""
        value = self.need(key) if default is None else self.get(key)
        check_count(str(self.files[0]), f"{self.architecture}.{key}", value, least)
        return int(default or 0) if value is None else int(value)

    def number(self, key: str, default: float) -> float:
        """Return a finite number. Raises StartError if it is none."""
        value = self.get(key)
        check_number(str(self.files[0]), f"{self.architecture}.{key}", value)
        return default if value is None else float(value)

    @property
    def name(self) -> str:
        """The model's name in the file, "" if it has none."""
        return str(self.metadata.get("general.name") or "")


class GgufFile(GGUFReader):
    """A GGUF file. Raises ValueError or KeyError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table: list[GgufTensor] = []
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        size = np.dtype(dtype).itemsize * int(count)
        if offset < 0 or offset + size > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data):,}, before {size:,} bytes that it should have")
        return super()._get(offset, dtype, int(count), override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            texts, end = self._strings(start, count)
            return end - orig_offs, [texts], [0], [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has arrays of arrays")
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        return 12 + values.nbytes, [values.tolist()], [0], [GGUFValueType.ARRAY, kind]

    def _strings(self, at: int, count: int) -> tuple[list[str], int]:
        """Return ``count`` strings from byte ``at`` on, and the byte after them."""
        buffer, end = self.data.data, len(self.data)
        if at + 8 * count > end:
            raise ValueError(f"it should have {count:,} strings, but ends before")
        order, found = "<Q" if self.byte_order == "I" else ">Q", list[str]()
        for _ in range(count):
            if at + 8 > end:
                raise ValueError("it ends inside a list of strings")
            (size,) = struct.unpack_from(order, buffer, at)
            at += 8
            if at + size > end:
                raise ValueError("it ends inside a string")
            found.append(str(buffer[at : at + size], "utf-8", "replace"))
            at += size
        return found, at

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            if not 1 <= len(dims) <= _MOST_DIMENSIONS:
                raise ValueError(f"it has a tensor of {len(dims)} dimensions")
            shape = tuple(map(int, reversed(dims.tolist())))
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
            elements = 1
            for each in shape:
                elements *= each
            text = bytes(name).decode("utf-8")
            if shape[-1] % block:
                raise ValueError(f"the rows of {text} are no whole blocks of {block}")
            place, nbytes = int(start_offs) + int(offset[0]), elements // block * size
            if place + nbytes > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data):,}, before the end of {text}")
            self.table.append(GgufTensor(text, int(kind[0]), shape, self.path, place, nbytes))

    def values(self) -> dict[str, Any]:
        """Return the metadata as Python values."""
        return {name: _value(field) for name, field in self.fields.items() if not name.startswith("GGUF.")}


def _value(field: ReaderField) -> Any:
    part: Any = field.parts[field.data[0]] if field.data else None
    if not field.types or part is None or field.types[0] == GGUFValueType.ARRAY:
        return part
    if field.types[0] == GGUFValueType.STRING:
        return bytes(part).decode("utf-8", "replace")
    return part.tolist()[0]


def shards_of(path: Path) -> tuple[Path, ...]:
    """Return all shards of the model of which ``path`` is one, in order; ``path`` alone if its name is not one of a
    shard. Raises StartError if one is missing."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found[3])
    paths = tuple(path.with_name(f"{found[1]}-{at + 1:05d}-of-{found[3]}.gguf") for at in range(count))
    if missing := [each.name for each in paths if not each.is_file()]:
        raise StartError(f"cannot open {path}", f"its shard {missing[0]} is missing", "download all shards")
    return paths


def open_gguf(paths: Sequence[Path]) -> GgufModel:
    """Open the shards of a model. Raises StartError if one is damaged or they do not belong together."""
    tensors, headers = dict[str, GgufTensor](), list[bytes]()
    metadata: dict[str, Any] = {}
    for at, path in enumerate(paths):
        file = open_gguf_file(path)
        values = file.values()
        check_count(str(path), "split.count", values.get("split.count"), 0)
        check_count(str(path), "split.no", values.get("split.no"), 0)
        number, count = int(values.get("split.no") or 0), int(values.get("split.count") or 1)
        if count > 1 and len(paths) == 1:
            why = f"its name is not that of shard {number + 1} of {count}"
            raise StartError(f"cannot open {path}", why, f"name the shards x-00001-of-{count:05d}.gguf and so on")
        if count != len(paths) or number != at:
            raise _damaged(path, f"it is shard {number} of {count}")
        metadata = metadata or values
        for tensor in file.table:
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                raise _damaged(path, f"it has the tensor {tensor.name} twice")
        headers.append(bytes(file.data[: file.data_offset]))
    wanted = metadata.get("split.tensors.count")
    if isinstance(wanted, int) and wanted != len(tensors):
        raise _damaged(paths[0], f"its shards have {len(tensors)} tensors of {wanted}")
    architecture = metadata.get("general.architecture")
    if metadata.get("general.type") == "adapter" or "adapter.type" in metadata:
        todo = "merge it into its base model, and serve that"
        raise StartError(f"cannot serve {paths[0]}", "it is an adapter (LoRA), without the weights of its model", todo)
    if not isinstance(architecture, str) or not tensors:
        raise _damaged(paths[0], "it names no architecture" if tensors else "it has no tensors")
    return GgufModel(architecture, metadata, tensors, tuple(paths), b"".join(headers))


def open_gguf_file(path: Path) -> GgufFile:
    """Read the header of one file. Raises StartError if it is damaged."""
    if (why := _not_readable(path)) is not None:
        raise why
    try:
        with np.errstate(all="ignore"):
            file = GgufFile(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, MemoryError) as error:
        raise _damaged(path, str(error.args[0] if error.args else error)) from error
    except OSError as error:
        raise StartError(f"cannot open {path}", error.strerror or str(error), "check the path") from error
    return file


def _not_readable(path: Path) -> StartError | None:
    """Return the error for a file that is whole, but a pointer, or of another version or byte order."""
    try:
        with path.open("rb") as opened:
            first = opened.read(24)
    except OSError:
        return None  # the reader says why
    if first.startswith(LFS):
        todo = "download the file: git lfs pull, or tandem up with the hub id"
        return StartError(f"cannot read {path}", "it is a pointer of git-lfs, not the model", todo)
    if not first.startswith(b"GGUF") or len(first) < 8:
        return None
    little, big = (int.from_bytes(first[4:8], order) for order in _BYTE_ORDERS)
    if big in _VERSIONS:
        why = "it is for processors with the other byte order (big-endian)"
        return StartError(f"cannot read {path}", why, "use the usual, little-endian file of the model")
    if little not in _VERSIONS and little < _UNLIKELY:
        why = f"it is a GGUF file of version {little}, and only versions 2 and 3 are read"
        return StartError(f"cannot read {path}", why, "use a newer file of the model, or convert it with llama.cpp")
    return None


def _damaged(path: Path, why: str) -> StartError:
    return StartError(f"cannot read {path}", f"the GGUF file is damaged or of another kind: {why}", _DAMAGED)
