"""Opens a checkpoint without its weights: of a hub repository, only small files and the headers of weight files are
fetched. For ``tandem inspect``, which says what a model needs before anything large is downloaded."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.checkpoint import hub
from common.checkpoint.files import Checkpoint, assemble, open_checkpoint, open_gguf_checkpoint, read_config
from common.checkpoint.sizes import sizes_of_safetensors
from common.checkpoint.support import refuse_unsupported
from common.checkpoint.weights import choose_files, indexed_files, parse_header, read_header
from common.core.errors import StartError
from common.kv.layout import KvDtype

_FIRST_BYTES = 4 << 20
"""Bytes of a GGUF file that are fetched first, to be doubled as long as its header is longer."""
_MOST_BYTES = 256 << 20
"""Bytes after which a file is taken to be damaged, if its header cannot be read."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored: its element type (as safetensors or ggml name it) and its shape, rows first."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements; of GGUF files, of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Preview:
    """A checkpoint, its tensors by name, and the bytes of its weight files. ``local``: whether these are on this
    machine. Without them ``checkpoint`` has no weight files and no fingerprint, and must not be loaded."""

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    weight_bytes: int
    local: bool

    @property
    def dtype(self) -> KvDtype:
        """Element type of the weights that are not quantized."""
        return self.checkpoint.dtype_among(tensor.kind for tensor in self.tensors.values())


def preview(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Preview:
    """Open the checkpoint in a local directory, in a GGUF file or of a hub id as
    :func:`common.checkpoint.files.open_checkpoint` does, without downloading weights. Raises StartError alike."""
    path = hub.local_path(model)
    if path.is_dir() or path.suffix.lower() == ".gguf" or hub.is_gguf(path):
        return _local(open_checkpoint(model, revision, trust_remote_code))
    name, tag = hub.split_tag(model)
    hub.check_id(name, path)
    first = hub.download_first(name, revision)
    file, note = hub.find_gguf(name, revision, tag, first)
    if file:
        return _of_gguf(model, name, revision, first / file, file, note)
    config = read_config(model, first)
    refuse_unsupported(model, config, trust_remote_code)
    text = hub.download_text(name, revision)
    with contextlib.suppress(StartError):  # not all weights are there
        files, notes = choose_files(model, text)
        return _local(assemble(model, revision, config, text, files, notes, trust_remote_code))
    names = indexed_files(first) or hub.weight_names(name, revision)
    if not names:
        raise StartError(f"cannot serve {model}", "it has no safetensors weights", "choose another checkpoint")
    headers, size = list[dict[str, dict[str, Any]]](), 0
    for each in names:
        with hub.open_remote(name, revision, each) as (remote, length):
            headers.append(parse_header(Path(each), remote, length)[1])
            size += length
    found = assemble(model, revision, config, text, (), (), trust_remote_code)
    if found.format.method:
        found = replace(found, sizes=sizes_of_safetensors(headers, found.format))
    return Preview(found, {key: each for header in headers for key, each in _tensors(header).items()}, size, False)


def _local(checkpoint: Checkpoint) -> Preview:
    if checkpoint.format.container == "gguf":
        return Preview(checkpoint, _of_gguf_files(checkpoint.weight_files), checkpoint.weight_bytes, True)
    tensors = dict[str, Tensor]()
    for file in checkpoint.weight_files:
        tensors |= _tensors(read_header(file)[1])
    return Preview(checkpoint, tensors, checkpoint.weight_bytes, True)


def _tensors(header: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {name: Tensor(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}


def _of_gguf_files(files: Sequence[Path]) -> dict[str, Tensor]:
    from gguf.constants import GGMLQuantizationType

    from common.checkpoint.gguf import open_gguf

    found = open_gguf(files).tensors.values()
    return {each.name: Tensor(GGMLQuantizationType(each.type).name, each.shape) for each in found}


def _of_gguf(model: str, name: str, revision: str | None, local: Path, file: str, note: str) -> Preview:
    """Return the preview of the GGUF file ``file`` of a repository, which is at ``local`` if it was downloaded."""
    if local.is_file():
        with contextlib.suppress(StartError):  # a shard is missing
            return _local(open_gguf_checkpoint(model, local, revision, note))
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / Path(each).name for each in hub.gguf_shards(file)]
        for shard in shards:
            _fetch_header(name, revision, str(Path(file).with_name(shard.name)), shard)
        found = open_gguf_checkpoint(model, shards[0], revision, note)
        size = sum(shard.stat().st_size for shard in shards)
        tensors = _of_gguf_files(shards)
    return Preview(replace(found, weight_files=(), fingerprint="", source=None), tensors, size, False)


def _fetch_header(name: str, revision: str | None, file: str, target: Path) -> None:
    """Write a GGUF file of which only the header is fetched: a file of the right length with holes. Raises
    StartError."""
    from common.checkpoint.gguf import open_gguf_file

    with hub.open_remote(name, revision, file) as (remote, length), target.open("wb") as local:
        local.truncate(length)
        count = 0
        while True:
            wanted = min(max(_FIRST_BYTES, count), length - count)
            local.write(remote.read(wanted))
            local.flush()
            count += wanted
            try:
                if open_gguf_file(target).data_offset <= count:
                    return
            except StartError:
                if count == length or count > _MOST_BYTES:
                    raise
