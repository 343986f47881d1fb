"""The model that is served when none is named: a small Llama with random weights, made on first use.

It talks nonsense, and the first screen says so; what it is good for is to see the whole system work without a download.
Made without torch, in about two seconds, atomically: whoever comes second finds it complete.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from common.config import CoordinatorConfig, UpConfig, WorkerConfig
from common.errors import StartError
from deploy.screen import command

NAME = "tandem-random"
_NOTICE = "its weights are random: it talks nonsense"
_EXAMPLE = "Qwen/Qwen3-0.6B"
_VERSION = 1
"""Part of the directory's name: raise it whenever what is written changes."""

_VOCABULARY = 4096
_SPECIAL = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% for call in message.get('tool_calls') or [] %}"
    "\n{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{% endfor %}"
    "<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": [1, 6],
    "dtype": "bfloat16",
}


M = TypeVar("M", UpConfig, CoordinatorConfig, WorkerConfig)


def with_model(config: M, environ: Mapping[str, str]) -> tuple[M, str]:
    """The same, with the built-in model where none is named, and what to say about it."""
    if config.model:
        return config, ""
    name = config.served_model_name or NAME
    return replace(config, model=str(ensure_model(environ)), served_model_name=name), _notice(config, environ)


def _notice(config: UpConfig | CoordinatorConfig | WorkerConfig, environ: Mapping[str, str]) -> str:
    """What to say about random weights, and how to name a model, in the words that this process was started by."""
    if isinstance(config, WorkerConfig):
        return f"{_NOTICE}. To get sense, name the model that the coordinator serves"
    way = f"{command()} {'up' if isinstance(config, UpConfig) else 'coordinator'} {_EXAMPLE}"
    if "MAKELEVEL" in environ and shutil.which("tandem") is None:
        way = f'make up ARGS="{_EXAMPLE}"'
    return f"{_NOTICE}. Name a model to get sense: {way}"


def ensure_model(environ: Mapping[str, str]) -> Path:
    """The directory of the built-in model, made now if it is not there yet."""
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"
    target = Path(home) / "tandem" / f"random-llama-{_VERSION}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _make(target)
    except OSError as error:
        raise StartError(
            f"cannot write the built-in model to {target.parent}", str(error), "set XDG_CACHE_HOME, or name a model"
        ) from error
    return target


def _make(target: Path) -> None:
    """Writes the model beside ``target`` and renames it there; losing that race to another process is fine."""
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(draft)
        _write_weights(draft / "model.safetensors")
        _write_json(draft / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1, 6]})
        _write_json(draft / "config.json", _CONFIG)
        draft.chmod(0o755)
        with contextlib.suppress(OSError):
            draft.rename(target)
        if not (target / "config.json").is_file():
            raise OSError(f"{target} is in the way")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer, trained on the text that every Python comes with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONFIG["max_position_embeddings"],
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, in transformers' names."""
    hidden, ffn, size = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["head_dim"]
    queries, keys = _CONFIG["num_attention_heads"] * size, _CONFIG["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (_VOCABULARY, hidden)
    for index in range(_CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{layer}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)


def _write_weights(path: Path) -> None:
    """A safetensors file: header length, JSON header, data. Norms are one, all else is normal noise.

    bfloat16, which numpy lacks, is the upper half of a rounded float32.
    """
    import numpy as np

    noise = np.random.default_rng(0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in _shapes():
        values = np.ones(shape) if len(shape) == 1 else noise.normal(0.0, 0.05, shape)
        bits = values.astype(np.float32).view(np.uint32)
        halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(halves)]}
        data += halves
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
