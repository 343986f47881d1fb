"""Writes an unquantized checkpoint with its linear layers rounded, as compressed-tensors has them (pack-quantized)."""

from __future__ import annotations

import glob
import json
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.checkpoint.files import Checkpoint
from common.core.errors import StartError, reason
from common.quantization.packing import pack_int32, unpack_nibbles
from common.quantization.rounded import EMBEDDINGS, OUTPUTS, choose
from common.quantization.source import TensorFiles, damaged
from common.quantization.weight import GROUPS, QuantizedWeight, quantize

_SHARD = 2 << 30
"""Bytes of tensors from which on a file is written; they are in memory until then."""
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
"""Files that are copied, unless they are an index of weights."""
Progress = Callable[[int], None]
"""Called with the bytes of weights that have been read."""


@dataclass
class Written:
    """What was written: modules ``rounded``, by the columns of their groups, and matrices that were ``kept`` as they
    are; bytes of all tensors ``before`` and ``after``."""

    rounded: dict[int, list[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class _Rounding:
    """How matrices are rounded, see :func:`common.quantization.weight.quantize`."""

    bits: Literal[4, 8]
    scales: torch.dtype
    symmetric: bool


def write_rounded(
    checkpoint: Checkpoint,
    out: Path,
    bits: Literal[4, 8],
    group: int,
    kept: Collection[str] = (),
    progress: Progress = lambda _: None,
    symmetric: bool = False,
) -> Written:
    """Write ``checkpoint`` to the new directory ``out``, with configuration and tokenizer.

    Matrices of linear layers are rounded to ``bits`` in groups of ``group`` columns, of fewer where these are no whole
    groups. Embeddings, output layers, routers, matrices whose rows are no whole groups of 16, and the tensors ``kept``
    stay as they are. With 8 bits, or if ``symmetric``, there are no zero points.

    Raises StartError if the checkpoint cannot be read, or ``out`` not be written; then nothing is left of it.
    """
    files, written = TensorFiles(checkpoint.weight_files), Written()
    chosen = _chosen(files, checkpoint, bits, group, kept, written)
    if not chosen:
        why = "it has no matrices of linear layers that can be rounded"
        raise StartError(f"cannot quantize {checkpoint.name}", why, "serve it as it is")
    scales = torch.bfloat16 if checkpoint.dtype == "bfloat16" else torch.float16  # those of the model: loaders convert
    partial = out.with_name(f"{_begun(out)}{os.getpid()}")
    try:
        _remove_abandoned(out)
        partial.mkdir(parents=True)
        _copy_texts(checkpoint, partial)
        ignored = written.kept if _has_output(files) else [*written.kept, "lm_head"]  # it has the embedding's weight
        _write_config(checkpoint, partial, quantization_config(bits, written.rounded, ignored, symmetric))
        rounds = _Rounding(bits, scales, symmetric)
        _write_shards(partial, _tensors(files, chosen, rounds, written, progress))
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise StartError(f"cannot write {out}", reason(error), "name another directory") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _begun(out: Path) -> str:
    """Return how the names of directories begin in which processes of this machine write what becomes ``out``."""
    return f".{out.name}.partial-{platform.node()}-"


def _remove_abandoned(out: Path) -> None:
    """Remove what processes that were killed have left of ``out``."""
    for left in out.parent.glob(f"{glob.escape(_begun(out))}*"):
        number = left.name.removeprefix(_begun(out))
        if number.isdecimal() and (int(number) == os.getpid() or not _is_running(int(number))):
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def _chosen(
    files: TensorFiles, checkpoint: Checkpoint, bits: Literal[4, 8], group: int, kept: Collection[str],
    written: Written,
) -> dict[str, int]:  # fmt: skip
    """Return the columns of a group, by the name of each tensor to be rounded, and note what is done in ``written``."""
    linear, found = choose(files, checkpoint.text_config, bits), dict[str, int]()
    for name in files.names:
        module, _, last = name.rpartition(".")
        part = module.rpartition(".")[2]
        if len(files.shape(name)) == 3:  # of all experts of a layer
            written.kept.append(module)
        if last != "weight" or len(files.shape(name)) != 2 or part in EMBEDDINGS:
            continue
        columns = files.shape(name)[1]
        size = next((size for size in GROUPS if size <= group and columns % size == 0), None)
        if name in linear and part not in OUTPUTS and size is not None and name not in kept:
            found[name] = size
            written.rounded.setdefault(size, []).append(module)
        else:
            written.kept.append(module)
    return found


def _has_output(files: TensorFiles) -> bool:
    return any(name.split(".")[-2:-1] in ([part] for part in OUTPUTS) for name in files.names)


def _tensors(
    files: TensorFiles, chosen: Mapping[str, int], rounds: _Rounding, written: Written, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """Yield the tensors to write."""
    for name in files.names:
        values = files.read(name)
        tensors = {name: values}
        if name in chosen:
            try:
                weight = quantize(values, rounds.bits, chosen[name], rounds.scales, rounds.symmetric)
            except ValueError as error:
                raise damaged(name, str(error)) from error
            tensors = {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in exported(weight).items()}
        written.before += values.nbytes
        written.after += sum(tensor.nbytes for tensor in tensors.values())
        yield from tensors.items()
        progress(written.before)


def _write_shards(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write safetensors files, with an index if they are several."""
    shards = list[list[str]]()
    held, size, total = dict[str, torch.Tensor](), 0, 0

    def flush() -> None:
        file = directory / f"{len(shards)}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", file)  # it would be for its owner only
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > _SHARD:
            flush()
            size = 0
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    places = {}
    for at, names in enumerate(shards):
        file = f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"{at}.safetensors").rename(directory / file)
        places.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _copy_texts(checkpoint: Checkpoint, out: Path) -> None:
    """Copy configuration, tokenizer, templates and code, but no weights."""
    for directory in dict.fromkeys((checkpoint.model_directory, checkpoint.path)):
        for file in (file for pattern in _TEXTS for file in directory.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
        templates = directory / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)


def _write_config(checkpoint: Checkpoint, out: Path, settings: Mapping[str, Any]) -> None:
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = settings
    (out / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def exported(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by their suffixes: ``weight_packed`` and so on.

    Raises ValueError unless ``weight`` is one of :func:`common.quantization.weight.quantize`: integers with one scale
    per group, symmetric of 8 bits or with zeros of 4 bits.
    """
    kept = {"codes", "scales", "zeros"}
    if weight.coding != "int" or not weight.tensors().keys() <= kept or weight.span != 1:
        raise ValueError(f"{weight.source or 'this weight'} is no weight of plain groups")
    if weight.zeros is None and weight.zero != 1 << weight.bits - 1:
        raise ValueError(f"a symmetric weight of {weight.bits} bits has the zero {1 << weight.bits - 1}")
    codes = unpack_nibbles(weight.codes, weight.group) if weight.bits == 4 else weight.codes
    found = {
        "weight_packed": pack_int32(codes[:, : weight.shape[1]], weight.bits),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        found["weight_zero_point"] = pack_int32(weight.zeros.t(), weight.bits).t().contiguous()
    return found


def quantization_config(
    bits: int, rounded: Mapping[int, Sequence[str]], ignored: Sequence[str], symmetric: bool = False
) -> dict[str, Any]:
    """Return ``quantization_config`` of a checkpoint with modules ``rounded`` to ``bits``, by the columns of a group.
    The group of most modules is that of all linear layers; modules in other groups and those ``ignored`` are named.
    8 bits are always ``symmetric``, without zero points."""
    usual = max(rounded, key=lambda size: len(rounded[size]))
    groups = {}
    for at, (size, modules) in enumerate(sorted(rounded.items(), key=lambda item: item[0] != usual)):
        weights = {
            "num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "dynamic": False,
            "symmetric": symmetric or bits == 8, "actorder": None, "observer": "minmax",
        }  # fmt: skip
        groups[f"group_{at}"] = {
            "targets": ["Linear"] if size == usual else list(modules), "weights": weights, "input_activations": None,
            "output_activations": None, "format": "pack-quantized",
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": list(dict.fromkeys(ignored)), "kv_cache_scheme": None,
    }  # fmt: skip
