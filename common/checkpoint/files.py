"""Reads a checkpoint directory without torch or transformers, since the coordinator and the launcher open checkpoints
too.

A model that ``config.json`` or the safetensors headers show to be unsupported is refused here, with a readable error
and before anything slow is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from common.core.errors import StartError, reason
from common.kv.layout import KvDtype, LayerLayout

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
HUB_TIMEOUT_S = 4.0
"""Timeout of the hub's answer about one file, in seconds; downloads themselves have none."""
RESTORE = "restore the file from where the model came from"
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_MAX_HEADER_BYTES = 100 << 20
_UNHASHED = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
_DTYPES: dict[str, KvDtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_STATEFUL = (
    "mamba", "rwkv", "jamba", "bamba", "zamba", "recurrent_gemma", "falcon_h1", "nemotron_h", "lfm2",
    "granitemoehybrid",
    "qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid", "xlstm", "minimax",
)  # fmt: skip
"""Prefixes of model types whose layers have a state besides keys and values."""
_QUANTIZED = {"gptq": "GPTQ", "awq": "AWQ", "fbgemm_fp8": "fp8", "bitsandbytes": "bitsandbytes", "mxfp4": "MXFP4"}
"""Names of quantization methods where they are not written as in ``quant_method``."""
_NO_GGUF = "Tandem does not read GGUF files", "use the model's unquantized checkpoint in safetensors format"
_DECODERS = "choose a decoder-only model (Llama, Qwen, Mistral, Gemma, Phi, ...)"


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. ``fingerprint`` identifies configuration and weights, independently of path and name (see
    :func:`fingerprint`)."""

    path: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weight_files: tuple[Path, ...]
    fingerprint: str

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def architecture(self) -> str:
        """The first class name in ``architectures``, "" if there is none."""
        return str((self.config.get("architectures") or [""])[0])

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the configuration. Raises KeyError if it names none."""
        return int(self.text_config["vocab_size"])

    @property
    def max_position(self) -> int:
        """The model's own context length in tokens."""
        config = self.text_config
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx"):
            if isinstance(config.get(key), int):
                return int(config[key])
        return 2048

    @property
    def position_limit(self) -> int:
        """Longest supported context in tokens; with ``dynamic`` rotary scaling it exceeds ``max_position``."""
        rope = self.text_config.get("rope_parameters") or self.text_config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type"))
        return int(self.max_position * rope.get("factor", 1)) if kind == "dynamic" else self.max_position

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence; generation_config.json takes precedence over config.json."""
        for source in (self.generation_config, self.config, self.text_config):
            if (value := source.get("eos_token_id")) is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        return ()

    @cached_property
    def dtype(self) -> KvDtype:
        """Element type of the weights: that of the configuration, else the most frequent one of the tensors."""
        config = self.config
        named = config.get("dtype") or config.get("torch_dtype") or self.text_config.get("dtype")
        if known := next((dtype for dtype in _DTYPES.values() if dtype == named), None):
            return known
        counts: Counter[str] = Counter()
        for path in self.weight_files:
            counts.update(entry["dtype"] for entry in read_header(path)[1].values())
        return next((_DTYPES[kind] for kind, _ in counts.most_common() if kind in _DTYPES), "float32")

    @cached_property
    def weight_bytes(self) -> int:
        """Size of all weight files in bytes."""
        return sum(path.stat().st_size for path in self.weight_files)

    def kv_layers(self) -> tuple[LayerLayout, ...] | None:
        """Return the KV shape of each layer from the configuration, or None if the configuration does not determine
        it."""
        config = self.text_config
        layers = config.get("num_hidden_layers", config.get("n_layer"))
        heads = config.get("num_attention_heads", config.get("n_head"))
        hidden = config.get("hidden_size", config.get("n_embd"))
        if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
            return None
        if "kv_lora_rank" in config:
            nope, rope, value = (config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            if not (isinstance(nope, int) and isinstance(rope, int) and isinstance(value, int)):
                return None
            return (LayerLayout(heads, nope + rope, value),) * layers
        dim = config.get("head_dim") or hidden // heads
        return (LayerLayout(config.get("num_key_value_heads") or heads, dim, dim),) * layers


def open_checkpoint(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Open the checkpoint in a local directory or of a hub id; raises StartError if it cannot be read or served."""
    directory = Path(model).expanduser()
    path = directory
    if not directory.is_dir():
        _check_hub_id(model, directory)
        first = _download(model, revision, ("config.json",))  # small: tells whether the weights are worth a download
        refuse_unsupported(model, _read_config(model, first), trust_remote_code)
        path = _download(model, revision, HUB_FILES)
    config = _read_config(model, path)
    refuse_unsupported(model, config, trust_remote_code)
    weights = _weight_files(model, path)
    return Checkpoint(
        path=path,
        name=model,
        revision=revision,
        config=config,
        generation_config=_read_json(path / "generation_config.json") or {},
        weight_files=weights,
        fingerprint=fingerprint(config, weights, revision),
    )


def refuse_unsupported(model: str, config: dict[str, Any], trust_remote_code: bool = False) -> None:
    """Raise StartError unless ``config`` is of a decoder-only causal language model that transformers supports, with
    weights that are not quantized."""
    kind = str(config.get("model_type", ""))
    architecture = str((config.get("architectures") or [""])[0])
    why, todo = None, _DECODERS
    if method := _quantization(config):
        why = f"Tandem does not read {method} checkpoints"
        todo = "use an unquantized one, with --quantization int8 if memory is short"
    elif config.get("is_encoder_decoder"):
        why = f"{architecture or kind} is an encoder-decoder model"
    elif kind.startswith(_STATEFUL) or "linear_attention" in (config.get("layer_types") or ()):
        why = f"{architecture or kind} has layers with a recurrent state, not only attention"
    elif "auto_map" in config and not trust_remote_code and not _known(architecture):
        why = f"{architecture or kind} needs Python code that comes with the checkpoint"
        todo = "give --trust-remote-code if you trust this code: it will run on this machine"
    elif not trust_remote_code and not _known(architecture):
        why = f"{architecture or kind or 'its architecture'} is not a decoder-only language model in transformers"
    if why:
        raise StartError(f"cannot serve {model}", why, todo)


def _quantization(config: dict[str, Any]) -> str | None:
    """Return the name of the method by which the weights are quantized, None if they are not."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or config.get("compression_config") or nested
    if not found:
        return None
    method = str(found.get("quant_method") or "quantized") if isinstance(found, dict) else "quantized"
    return _QUANTIZED.get(method, method)


def _known(architecture: str) -> bool:
    """Return whether transformers has this causal language model. Searches its source, because importing it is slow."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    source = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        text = source.read_text()
    except OSError:
        return True
    _, found, rest = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    names = set(re.findall(r'"(\w+)"\s*\)', rest.partition("\n)\n")[0]))
    return not found or architecture in names


# -- files ------------------------------------------------------------------------------------------------------------


def _check_hub_id(model: str, path: Path) -> None:
    """Raise StartError if ``model``, which is no directory (``path``), cannot be the id of a hub repository."""
    if model.lower().endswith(".gguf"):
        raise StartError(f"cannot open {model}", *_NO_GGUF)
    if path.exists():
        why, todo = "it is a file", "give the directory of a transformers checkpoint, or a hub id (owner/name)"
        raise StartError(f"cannot open {model}", why, todo)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        todo = "check the path, or give a hub id (owner/name)"
        raise StartError(f"cannot open {model}", "there is no such directory", todo)


def _download(model: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return the local snapshot of a hub repository with the files that match ``patterns``, downloaded if needed.
    Raises StartError if they cannot be downloaded."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download  # here, since the import takes half a second

    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(patterns), etag_timeout=HUB_TIMEOUT_S)
        )
    except Exception as error:  # its errors (offline, absent, gated, bad revision) have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartError(
            f"cannot open {model}",
            f"there is no such directory, and the download from the hub failed: {reason[:200]}",
            "check the path or the hub id, the network, and HF_TOKEN for gated models",
        ) from error


def _read_config(model: str, path: Path) -> dict[str, Any]:
    """Return the content of config.json in the directory ``path``. Raises StartError if there is none."""
    if (config := _read_json(path / "config.json")) is not None:
        return config
    if any(path.glob("*.gguf")):
        raise StartError(f"cannot serve {model}", *_NO_GGUF)
    todo = "give the directory of a transformers checkpoint"
    raise StartError(f"cannot serve {model}", f"{path} has no config.json", todo)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"cannot read {path}", reason(error), RESTORE) from error
    if not isinstance(content, dict):
        raise StartError(f"cannot read {path}", "it is not a JSON object", RESTORE)
    return content


def _weight_files(model: str, path: Path) -> tuple[Path, ...]:
    """Return the safetensors files, sorted by name; raises StartError if one is missing or there are none."""
    index = _read_json(path / "model.safetensors.index.json")
    if index is not None:
        files = [path / name for name in sorted(set(index.get("weight_map", {}).values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise StartError(f"cannot serve {model}", f"{missing[0]} is missing from {path}", "download the model again")
    if not files:
        other = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        why = "its weights are pickled files, which can run code" if other else "it has no weights"
        todo = "use a checkpoint in safetensors format"
        raise StartError(f"cannot serve {model}", f"{why}: {path} has no *.safetensors", todo)
    return tuple(files)


def read_header(path: Path) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """Return the raw header of a safetensors file and the header's entries by tensor name; raises StartError if the
    file is damaged or cut short."""
    with path.open("rb") as file:
        raw = _raw_header(file)
        try:
            tensors = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, "its header is not valid") from error
        if 8 + len(raw) + end != os.fstat(file.fileno()).st_size:
            raise _damaged(path, "its size does not match its header")
    return raw, tensors


def _raw_header(file: BinaryIO) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= _MAX_HEADER_BYTES or len(raw := file.read(size)) != size:
        raise _damaged(Path(file.name), "its header is cut short")
    return raw


def _damaged(path: Path, why: str) -> StartError:
    return StartError(f"cannot read {path}", f"the safetensors file is damaged: {why}", "download the model again")


def fingerprint(config: dict[str, Any], weights: tuple[Path, ...], revision: str | None = None) -> str:
    """Return 16 hex digits of a hash over configuration, revision, tensor headers, file sizes and a sample of each
    file's bytes. A sample is fast to read; :func:`common.model.load.read_weights`, which reads all bytes anyway, hashes
    all of them."""
    digest = hashlib.blake2b(digest_size=8)
    kept = {key: value for key, value in config.items() if key not in _UNHASHED}
    digest.update(json.dumps([kept, revision or ""], sort_keys=True).encode())
    for path in weights:
        header, _ = read_header(path)
        size = path.stat().st_size
        digest.update(f"|{size}|".encode())
        digest.update(header)
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
