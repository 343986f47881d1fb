"""Which safetensors files of a directory are the model's weights, and their headers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from common.checkpoint.json_files import RESTORE, read_json
from common.core.errors import StartError

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
IGNORED = ("consolidated*.safetensors", "adapter_model*.safetensors", "*.fp16.safetensors", "*.fp32.safetensors")
"""Names of files that hold no weights of the model, or the same ones again in another layout."""
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
LFS = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100 << 20


def choose_files(model: str, path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the safetensors files that hold the model's weights, sorted by name, and notes on what was left out.

    They are those that the index names; without an index, or if files that it names are absent while other whole
    weights are there, all at the top level except :data:`IGNORED` ones. Raises StartError if there are none, if one is
    missing, or if there is only an adapter."""
    notes = list[str]()
    present = [file for file in sorted(path.glob("*.safetensors")) if not any(map(file.match, IGNORED))]
    index = read_json(path / INDEX)
    if index is None:
        files = present
    else:
        files = [path / name for name in _named(path / INDEX, index)]
        if any(not file.is_file() for file in files) and (whole := _whole(present)):
            notes.append(f"{INDEX} names files that are absent: {', '.join(file.name for file in whole)} used instead")
            files = whole
    if missing := [file.name for file in files if not file.is_file()]:
        raise StartError(f"cannot serve {model}", f"{missing[0]} is missing from {path}", "download the model again")
    if not files:
        raise _no_weights(model, path)
    if index is None:
        if absent := _absent_shard(files):
            why = f"{absent} and the index {INDEX} are missing from {path}"
            raise StartError(f"cannot serve {model}", why, "download the model again")
        files, more = _without_duplicates(model, files)
        notes += more
    if (path / ADAPTER).is_file():
        notes.append(f"{ADAPTER}: the adapter beside the weights is ignored")
    return tuple(files), tuple(notes)


def indexed_files(path: Path) -> tuple[str, ...]:
    """Return the names of the weight files in the index of the directory ``path``, () if there is no index."""
    index = read_json(path / INDEX)
    return () if index is None else _named(path / INDEX, index)


def _named(file: Path, index: dict[str, Any]) -> tuple[str, ...]:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise StartError(f"cannot read {file}", "its weight_map is no map of tensors to files", RESTORE)
    found = sorted(set(names.values()))
    if outside := [name for name in found if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise StartError(f"cannot read {file}", f"it names {outside[0]}, outside of the checkpoint", RESTORE)
    return tuple(found)


def _whole(files: list[Path]) -> list[Path]:
    """Return ``model.safetensors`` alone, else a complete set of shards of ``files``, [] if there is neither."""
    if single := [file for file in files if file.name == "model.safetensors"]:
        return single
    sets: dict[tuple[str, int], list[Path]] = {}
    for file in files:
        if found := _SHARD.fullmatch(file.name):
            sets.setdefault((found[1], int(found[3])), []).append(file)
    return next((shards for (_, count), shards in sets.items() if len(shards) == count), [])


def _absent_shard(files: list[Path]) -> str:
    """Return the name of a shard that is missing from ``files``, "" if none is or if there are whole weights."""
    names = {file.name for file in files}
    if _whole(files) or not (shards := [found for name in sorted(names) if (found := _SHARD.fullmatch(name))]):
        return ""
    start, count = shards[0][1], shards[0][3]
    expected = (f"{start}-{at + 1:05d}-of-{count}.safetensors" for at in range(int(count)))
    return next((name for name in expected if name not in names), "")


def _without_duplicates(model: str, files: list[Path]) -> tuple[list[Path], list[str]]:
    """Return ``files`` without those that hold tensors of another one again: if several have the same tensor, only the
    whole set of :func:`_whole` stays. Raises StartError if there is no such set."""
    seen: dict[str, Path] = {}
    for file in files:
        for name in read_header(file)[1] if len(files) > 1 else ():
            other = seen.setdefault(name, file)
            if other == file:
                continue
            if not (whole := _whole(files)):
                why = f"{other.name} and {file.name} both have the tensor {name}, and there is no {INDEX}"
                raise StartError(f"cannot serve {model}", why, "remove the files that are not the model's weights")
            left = [each.name for each in files if each not in whole]
            return whole, [f"ignored, since {whole[0].name} has their tensors: {', '.join(left)}"] if left else []
    return files, []


def adapter_alone(model: str, path: Path) -> StartError | None:
    """Return the error for the directory of an adapter without the weights of a model, None if it has no adapter."""
    adapter = read_json(path / ADAPTER)
    if adapter is None:
        return None
    base = adapter.get("base_model_name_or_path") or "unknown"
    return StartError(
        f"cannot serve {model}",
        f"it is an adapter for {base}, without the weights of that model",
        "merge it into its base model (peft: merge_and_unload) and serve the result",
    )


def _no_weights(model: str, path: Path) -> StartError:
    if adapter := adapter_alone(model, path):
        return adapter
    if ignored := sorted(file.name for file in path.glob("*.safetensors") if any(map(file.match, IGNORED))):
        why = f"it has no weights in transformers' layout: {path} has only {', '.join(ignored[:3])}"
        todo = "choose a checkpoint with model.safetensors, or rename the file if it is in that layout"
        return StartError(f"cannot serve {model}", why, todo)
    if (path / INDEX).is_file():
        return StartError(f"cannot serve {model}", f"{path / INDEX} names no file", RESTORE)
    other = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
    why = "its weights are pickled files, which can run code" if other else "it has no weights"
    todo = "use a checkpoint in safetensors format"
    return StartError(f"cannot serve {model}", f"{why}: {path} has no *.safetensors", todo)


def read_header(path: Path) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """Return the raw header of a safetensors file and the header's entries by tensor name; raises StartError if the
    file is damaged or cut short."""
    with path.open("rb") as file:
        return parse_header(path, file, os.fstat(file.fileno()).st_size)


def parse_header(path: Path, file: BinaryIO, length: int) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """Return what :func:`read_header` does of ``file``, which is at its begin, ``length`` bytes long and called
    ``path``."""
    first = file.read(8)
    if first == LFS[:8]:
        todo = "download the weights: git lfs pull, or tandem up with the hub id"
        raise StartError(f"cannot read {path}", "it is a pointer of git-lfs, not the weights", todo)
    size = int.from_bytes(first, "little")
    if not 2 <= size <= _MAX_HEADER_BYTES or len(raw := file.read(size)) != size:
        raise _damaged(path, "its header is cut short")
    try:
        tensors = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if not all(isinstance(each["dtype"], str) and _is_shape(each["shape"]) for each in tensors.values()):
            raise ValueError("no type or shape")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header is not valid") from error
    if 8 + size + end != length:
        raise _damaged(path, "its size does not match its header")
    return raw, tensors


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _damaged(path: Path, why: str) -> StartError:
    return StartError(f"cannot read {path}", f"the safetensors file is damaged: {why}", "download the model again")
