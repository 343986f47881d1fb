"""Opens a checkpoint without torch or transformers, since the coordinator and the launcher open checkpoints too.

A model that ``config.json`` or the safetensors headers show to be unsupported is refused here, with a readable error
and before anything slow is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from common.checkpoint import context, hub, kv_shape
from common.checkpoint.convert_tokenizer import readable_text
from common.checkpoint.end_tokens import EndToken, find_end_tokens
from common.checkpoint.formats import (
    GGUF,
    SAFETENSORS,
    WeightFormat,
    check_codes,
    is_quantized,
    read_format,
    settings_beside,
)
from common.checkpoint.generation import clamp
from common.checkpoint.json_files import read_json
from common.checkpoint.sizes import Sizes, rounded, sizes_of_gguf, sizes_of_safetensors
from common.checkpoint.support import architecture_of, refuse_unsupported
from common.checkpoint.text_directory import key_of, text_directory
from common.checkpoint.values import check_config, with_defaults
from common.checkpoint.weights import adapter_alone, choose_files, read_header
from common.core.errors import StartError
from common.kv.layout import ELEMENT_BYTES, KvDtype, LayerLayout

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_UNHASHED = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
ROUNDED: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}
"""Bits of a weight, by the way of quantizing at load."""
_DTYPES: dict[str, KvDtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. ``fingerprint`` identifies configuration and weights, independently of path and name (see
    :func:`fingerprint`).

    ``path`` is a directory with the configuration, the tokenizer and the chat templates as JSON files: the checkpoint's
    own, or one that was generated from it. ``source`` is the checkpoint itself, a directory or a file, None if it is
    ``path``. ``end_tokens`` end a sequence. ``notes``: what was left out or changed, in words. ``sizes``: what the
    weights of a quantized checkpoint take in memory, else None."""

    path: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weight_files: tuple[Path, ...]
    fingerprint: str
    source: Path | None = None
    format: WeightFormat = SAFETENSORS
    end_tokens: tuple[EndToken, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Sizes | None = None

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration, with the default sizes of its class."""
        return with_defaults(self.config)

    @property
    def architecture(self) -> str:
        """The name of the model's class, see :func:`common.checkpoint.support.architecture_of`."""
        return architecture_of(self.config)

    @property
    def model_directory(self) -> Path:
        """The directory from which transformers reads configuration, code and safetensors weights."""
        return self.source if self.source is not None and self.source.is_dir() else self.path

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the configuration. Raises StartError if neither it nor its class names one."""
        if (size := self.text_config.get("vocab_size")) is None:
            todo = "add the number of rows of the embedding to config.json"
            raise StartError(f"cannot serve {self.name}", "its configuration has no vocab_size", todo)
        return int(size)

    @property
    def max_position(self) -> int:
        """The model's own context length in tokens."""
        return context.made_for(self.text_config)

    @property
    def position_limit(self) -> int:
        """Longest supported context in tokens; rotary scaling can reach beyond ``max_position``."""
        return context.limit(self.text_config)[0]

    @property
    def scaling(self) -> str:
        """Why ``position_limit`` exceeds ``max_position``, "" if it does not."""
        return context.limit(self.text_config)[1]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a sequence."""
        return tuple(token.id for token in self.end_tokens)

    def remarks(self) -> list[str]:
        """Return what to say when the model is served: the tokens that end a sequence, and ``notes``."""
        ends = ", ".join(map(str, self.end_tokens)) or "none: answers run to their limit of tokens"
        return [f"end tokens: {ends}", *self.notes]

    @cached_property
    def dtype(self) -> KvDtype:
        """Element type of the weights: that of the configuration, else the most frequent one of the tensors."""
        return self.dtype_among(entry["dtype"] for path in self.weight_files for entry in read_header(path)[1].values())

    def dtype_among(self, kinds: Iterable[str]) -> KvDtype:
        """Return the element type of the weights, of which each tensor has one of ``kinds`` (safetensors' names)."""
        config = self.config
        named = config.get("dtype") or config.get("torch_dtype") or self.text_config.get("dtype")
        if known := next((dtype for dtype in _DTYPES.values() if dtype == named), None):
            return known
        counts = Counter(kinds)
        return next((_DTYPES[kind] for kind, _ in counts.most_common() if kind in _DTYPES), "float32")

    @cached_property
    def weight_bytes(self) -> int:
        """Size of all weight files in bytes."""
        return sum(path.stat().st_size for path in self.weight_files)

    def bytes_in(self, dtype: KvDtype, quantization: str = "none") -> int:
        """Return the bytes of the weights in memory, with elements of ``dtype``. Quantized ones stay quantized; others
        are rounded by a ``quantization`` "int8" or "int4"."""
        sizes = self.sizes
        if sizes is None and quantization in ROUNDED:
            tied = bool(self.config.get("tie_word_embeddings", self.text_config.get("tie_word_embeddings")))
            sizes = rounded((read_header(path)[1] for path in self.weight_files), ROUNDED[quantization], tied)
        if sizes is not None:
            return sizes.bytes_in(ELEMENT_BYTES[dtype])
        return self.weight_bytes * ELEMENT_BYTES[dtype] // ELEMENT_BYTES[self.dtype]

    def kv_layers(self) -> tuple[LayerLayout, ...] | None:
        """Return the KV shape of each layer from the configuration, or None if the configuration does not determine
        it."""
        return kv_shape.layers_of(self.text_config)


def open_checkpoint(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Open the checkpoint in a local directory or of a hub id; raises StartError if it cannot be read or served."""
    path = hub.local_path(model)
    if not path.is_dir():
        if hub.is_gguf(path):
            return open_gguf_checkpoint(model, path, revision)
        if path.suffix.lower() == ".gguf":
            raise StartError(f"cannot open {model}", "there is no such GGUF file", "check the path")
        name, tag = hub.split_tag(model)
        hub.check_id(name, path)
        first = hub.download_first(name, revision)
        file, note = hub.find_gguf(name, revision, tag, first)
        if file:
            return open_gguf_checkpoint(model, hub.download_gguf(name, revision, file), revision, note)
        refuse_unsupported(model, read_config(model, first), trust_remote_code)
        path = hub.download_rest(name, revision, first, trust_remote_code)
    names = [] if any(path.glob("*.safetensors")) else _gguf_names(path)
    if names:  # whether there is a config.json beside them or not
        file, note = hub.choose_gguf(names, "")
        if not file:
            why = f"its GGUF files hold no language model: {', '.join(names[:3])}"
            raise StartError(f"cannot serve {model}", why, "download the file of the language model, too")
        return open_gguf_checkpoint(model, path / file, revision, note)
    config = read_config(model, path)
    refuse_unsupported(model, config, trust_remote_code)
    weights, notes = choose_files(model, path)
    return assemble(model, revision, config, path, weights, notes, trust_remote_code)


def _gguf_names(path: Path) -> list[str]:
    """Return the GGUF files at the top of the directory ``path``; without any, those in folders of it, where
    repositories have the shards of large models."""
    files = list(path.glob("*.gguf")) or list(path.glob("*/*.gguf"))
    return sorted(str(file.relative_to(path)) for file in files)


def assemble(
    model: str,
    revision: str | None,
    config: dict[str, Any],
    path: Path,
    weights: tuple[Path, ...],
    notes: Sequence[str],
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Return the checkpoint of ``config`` with ``weights``, whose other files are in the directory ``path``. Raises
    StartError if one cannot be read or served."""
    generation, changed = clamp(read_json(path / "generation_config.json") or {})
    text, converted = readable_text(model, path, _vocab_size(config), trust_remote_code)
    ends, dropped = find_end_tokens(text, config, generation, _vocab_size(config))
    kind = read_format(config, model)
    entries = (entry for file in weights for entry in read_header(file)[1].items())
    check_codes(model, kind, ((name, str(entry["dtype"])) for name, entry in entries))
    return Checkpoint(
        path=text,
        name=model,
        revision=revision,
        config=config,
        generation_config=generation,
        weight_files=weights,
        fingerprint=fingerprint(config, weights, revision),
        source=None if text == path else path,
        format=kind,
        sizes=sizes_of_safetensors((read_header(file)[1] for file in weights), kind) if kind.method else None,
        end_tokens=ends,
        notes=(*notes, *changed, *([converted] if converted else []), *dropped),
    )


def open_gguf_checkpoint(model: str, path: Path, revision: str | None, note: str = "") -> Checkpoint:
    """Open the model in a GGUF file, or in all shards of which ``path`` is one."""
    from common.checkpoint import gguf, gguf_config, gguf_tokenizer  # here, since they import numpy and tokenizers
    from common.checkpoint.gguf_check import check_tensors
    from common.checkpoint.gguf_names import targets

    found = gguf.open_gguf(gguf.shards_of(path))
    config, generation = gguf_config.config_of(found), gguf_config.generation_of(found)
    check_config(model, config)
    refuse_unsupported(model, config)
    targets(found)  # raises StartError if a tensor has no place
    check_tensors(found, config)
    key = key_of("gguf", json.dumps([config, generation]), found.header)
    text = text_directory(key, lambda to: _write_text(to, gguf_tokenizer.text_files(found, config, generation)))
    ends, dropped = find_end_tokens(text, config, generation, _vocab_size(config), made_from="GGUF")
    return Checkpoint(
        path=text,
        name=model,
        revision=revision,
        config=config,
        generation_config=generation,
        weight_files=found.files,
        fingerprint=_digest(config, [(found.header, file) for file in found.files], revision),
        source=path,
        format=GGUF,
        end_tokens=ends,
        notes=(*([note] if note else []), *dropped),
        sizes=sizes_of_gguf(found.tensors.values()),
    )


def _write_text(directory: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")


def _vocab_size(config: dict[str, Any]) -> int | None:
    size = with_defaults(config).get("vocab_size")
    return size if isinstance(size, int) else None


def read_config(model: str, path: Path) -> dict[str, Any]:
    """Return the content of config.json in the directory ``path``. Raises StartError if there is none, or if its sizes
    are no sizes."""
    if (config := read_json(path / "config.json")) is not None:
        check_config(model, config)
        if not is_quantized(config) and (settings := settings_beside(path)):
            config["quantization_config"] = settings
        return config
    if (adapter := adapter_alone(model, path)) is not None:
        raise adapter
    todo = "give the directory of a transformers checkpoint"
    if snapshots := sorted(path.glob("snapshots/*/config.json")):  # the hub client's cache of a repository
        todo = f"give the hub id, or the snapshot in it: {snapshots[-1].parent}"
    raise StartError(f"cannot serve {model}", f"{path} has no config.json", todo)


def fingerprint(config: dict[str, Any], weights: tuple[Path, ...], revision: str | None = None) -> str:
    """Return 16 hex digits of a hash over configuration, revision, tensor headers, file sizes and a sample of each
    file's bytes. A sample is fast to read; :func:`common.model.load.read_weights`, which reads all bytes anyway, hashes
    all of them."""
    return _digest(config, [(read_header(path)[0], path) for path in weights], revision)


def _digest(config: dict[str, Any], files: Iterable[tuple[bytes, Path]], revision: str | None) -> str:
    """Return the hash of :func:`fingerprint`. ``files``: the header and the path of each."""
    digest = hashlib.blake2b(digest_size=8)
    kept = {key: value for key, value in config.items() if key not in _UNHASHED}
    digest.update(json.dumps([kept, revision or ""], sort_keys=True).encode())
    for header, path in files:
        size = path.stat().st_size
        digest.update(f"|{size}|".encode())
        digest.update(header)
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
