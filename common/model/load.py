"""Loading of a checkpoint as a transformers model that calls our attention.

Weights go through ``from_pretrained``, because transformers converts some on the way (fused experts, renamed keys). The
shards are read once, in order, before that: this shows real progress, brings them into the page cache for the mapping,
and hashes every byte for the fingerprint.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import nn

from common.attention.interface import ATTENTION, from_transformers
from common.checkpoint.files import Checkpoint
from common.checkpoint.weights import indexed_files
from common.core.errors import StartError
from common.kv.budget import human_bytes
from common.kv.layout import KvDtype
from common.kv.storage.tensors import DTYPES
from common.platform.memory import free_memory

Progress = Callable[[int, int, str], None]
"""Called with (bytes read, bytes in all, name of the file that is read or was read last)."""
_CHUNK_BYTES = 1 << 20
"""Small enough to be hashed while it is still in the processor's cache."""
_REPORT_BYTES = 64 << 20
"""Bytes of a file between two reports of progress."""

log = logging.getLogger("tandem.load")


def read_weights(
    checkpoint: Checkpoint,
    dtype: KvDtype,
    progress: Progress | None = None,
    *,
    for_gpu: bool = False,
    quantization: str = "none",
) -> str:
    """Read every shard through the page cache; return a hash over all their bytes, 16 hex digits (XXH3-64, which
    detects accidents, not forgeries). StartError if memory is too small for the weights in ``dtype``, after
    ``quantization``; those ``for_gpu`` are copied from the mapped files, unless they have to be converted."""
    if not for_gpu or dtype != checkpoint.dtype:
        _check_memory(checkpoint, dtype, quantization)
    progress, files = progress or default_progress(), checkpoint.weight_files
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(_CHUNK_BYTES))
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        progress(done, total, path.name)
        reported = done
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                digest.update(buffer[:read])  # releases the interpreter lock
                done += read
                if done - reported >= _REPORT_BYTES:
                    progress(done, total, path.name)
                    reported = done
    progress(total, total, files[-1].name)
    return str(digest.hexdigest())


def load_model(checkpoint: Checkpoint, dtype: str, trust_remote_code: bool = False) -> nn.Module:
    """Return the model in ``dtype``, in evaluation mode, calling our attention; StartError if it cannot be loaded."""
    transformers = quiet_transformers()
    auto, how = transformers.AutoModelForCausalLM, {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION}
    local = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    directory = checkpoint.model_directory
    try:
        if _finds_weights(checkpoint):
            model, info = auto.from_pretrained(
                directory, output_loading_info=True, ignore_mismatched_sizes=True, **how, **local
            )
        else:
            config = transformers.AutoConfig.from_pretrained(directory, **local)
            with torch.device("meta"):
                whole = auto.from_config(config, trust_remote_code=trust_remote_code, **how)
            model, info = type(whole).from_pretrained(
                None, config=config, state_dict=dict(_slices(checkpoint)), output_loading_info=True,
                ignore_mismatched_sizes=True, **how,
            )  # fmt: skip
    except Exception as error:  # configuration and modelling code may raise anything
        raise unloadable(checkpoint, error) from error
    check_complete(checkpoint, info)
    frozen: nn.Module = model.eval().requires_grad_(False)
    return frozen


def _finds_weights(checkpoint: Checkpoint) -> bool:
    """Return whether transformers, given the directory, loads exactly the chosen weight files."""
    directory = checkpoint.model_directory
    single = directory / "model.safetensors"
    if single.is_file():
        return checkpoint.weight_files == (single,)
    return [path.name for path in checkpoint.weight_files] == list(indexed_files(directory))


def _slices(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yield the weights by name, read when transformers asks for them."""
    for path in checkpoint.weight_files:
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_slice(name)


def quiet_transformers() -> Any:
    """Return the module ``transformers``, without progress bars and warnings, and with our attention registered."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(ATTENTION, from_transformers)
    return transformers


def _check_memory(checkpoint: Checkpoint, dtype: KvDtype, quantization: str) -> None:
    need = checkpoint.bytes_in(dtype, quantization)
    if need > (free := free_memory()):
        raise StartError(
            f"too little memory for the weights of {checkpoint.name}",
            f"they take {human_bytes(need)} in {dtype}, {human_bytes(free)} are free",
            "choose a smaller model, free memory, or run fewer workers on this machine",
        )


def unloadable(checkpoint: Checkpoint, error: Exception) -> StartError:
    """Return the error for a model that transformers could not load."""
    text = " ".join(str(error).split())
    return StartError(
        f"cannot load {checkpoint.name}",
        f"transformers says {type(error).__name__}: {text[:300]}",
        "check that the checkpoint is complete and that this transformers release supports it",
    )


def check_complete(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    """Raise StartError if weights are missing or of another shape: transformers fills them with random numbers, and a
    model with random weights answers, but only nonsense. ``info``: that of a loading with
    ``ignore_mismatched_sizes``."""
    if misfits := sorted(info.get("mismatched_keys") or ()):
        name, stored, wanted = misfits[0]
        raise StartError(
            f"cannot load {checkpoint.name}",
            f"{len(misfits)} weights have other shapes than its configuration asks for, the first is {name}: "
            f"{_shown(stored)}, not {_shown(wanted)}",
            "correct config.json, or download the model again",
        )
    if missing := sorted(info.get("missing_keys") or ()):
        raise StartError(
            f"cannot load {checkpoint.name}",
            f"{len(missing)} weights are missing, the first is {missing[0]}",
            "download the model again, all of its shards",
        )


def _shown(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def detach_from_files(model: nn.Module) -> int:
    """Copy weights that still lie in a mapped safetensors file into memory of their own; return their number.

    To be called after packing, when few are left. A mapping would keep the whole file resident, and overwriting the
    file in place would change the weights or kill the process.
    """
    mapped = _mapped_ranges(".safetensors")
    count = 0
    for weight in model.parameters():
        if weight.device.type == "cpu" and any(start <= weight.data_ptr() < end for start, end in mapped):
            weight.data = weight.data.clone()
            count += 1
    return count


def _mapped_ranges(suffix: str) -> list[tuple[int, int]]:
    """Return the address ranges of this process that map files whose names end in ``suffix``."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(suffix):
            start, _, end = line.split()[0].partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


# -- progress ---------------------------------------------------------------------------------------------------------


def default_progress() -> Progress:
    """Return a progress bar on a terminal, one log line per file elsewhere."""
    return _bar() if sys.stderr.isatty() else _Lines()


class _Lines:
    """Logs the name of each file as it is begun."""

    def __init__(self) -> None:
        self._name = ""

    def __call__(self, done: int, total: int, name: str) -> None:
        if name != self._name and done < total:
            self._name = name
            log.info("reading weights: %s, from byte %s of %s", name, f"{done:,}", f"{total:,}")


def _bar() -> Progress:
    from tqdm import tqdm

    bar: Any = tqdm(desc="weights", unit="B", unit_scale=True, leave=False)

    def show(done: int, total: int, name: str) -> None:
        bar.total = total
        bar.set_postfix_str(name, refresh=False)
        bar.update(done - bar.n)
        if done == total:
            bar.close()
        else:
            bar.refresh()

    return show


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``; StartError if it cannot be served."""
    if name not in DTYPES:
        raise StartError(f"cannot serve with dtype {name}", f"supported are {', '.join(DTYPES)}", "use --dtype auto")
    return DTYPES[name]
