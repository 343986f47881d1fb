"""Values of a checkpoint's configuration: checked before anything computes with them, and completed by the defaults of
the model's class in transformers.

transformers leaves out of config.json what equals the default of the class, so absent sizes are common.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from common.checkpoint.transformers_source import module_of, source
from common.core.errors import StartError

LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_SIZES = (
    ("vocab_size",),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads"),
    ("hidden_size", "n_embd", "d_model"),
    ("num_key_value_heads",),
    ("head_dim",),
    LENGTHS,
)
"""Keys of numbers that are at least 1, those of one line for the same number. Some models have lists, per layer."""
_MOST = 2**31 - 1


def check_config(subject: str, config: Mapping[str, Any]) -> None:
    """Raise StartError, which names the key and its value, if a size of ``config`` or a number of its rotary scaling is
    none. ``subject``: what is opened, for the message."""
    for name in ("text_config", "rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise _wrong(subject, name, config[name], "an object")
    for part in (config, config.get("text_config") or {}):
        for key, kind, wanted in (("model_type", str, "a text"), ("layer_types", list, "a list")):
            if not isinstance(part.get(key), kind | None):
                raise _wrong(subject, key, part[key], wanted)
        for keys in _SIZES:
            for key in keys:
                check_count(subject, key, part.get(key), per_layer=key != "vocab_size")
        for name in ("rope_parameters", "rope_scaling"):
            for key, value in _numbers(part.get(name)):
                check_number(subject, f"{name}.{key}", value)
                if value is not None and value <= 0:
                    raise _wrong(subject, f"{name}.{key}", value, "above 0")


def _numbers(rope: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of rotary parameters that are to be numbers, those of each type of layer, too."""
    for key, value in rope.items() if isinstance(rope, dict) else ():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in _numbers(value))
        elif key in ("factor", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
            yield key, value


def check_count(subject: str, key: str, value: Any, least: int = 1, *, per_layer: bool = False) -> None:
    """Raise StartError unless ``value`` is None, a whole number of at least ``least``, or, if it may be given
    ``per_layer``, a list of such."""
    if value is None:
        return
    for each in value if per_layer and isinstance(value, list) else (value,):
        if type(each) is not int or not least <= each <= _MOST:
            raise _wrong(subject, key, value, f"a whole number from {least} to {_MOST}")


def check_number(subject: str, key: str, value: Any) -> None:
    """Raise StartError unless ``value`` is None or a finite number that a float can hold."""
    if value is None:
        return
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return
    except OverflowError:  # an integer beyond all floats
        pass
    raise _wrong(subject, key, value, "a finite number")


def shown(value: Any) -> str:
    """Return ``value`` for a message, cut if it is long."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of more than 40 digits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def _wrong(subject: str, key: str, value: Any, wanted: str) -> StartError:
    return StartError(
        f"cannot serve {subject}",
        f"its {key} is {shown(value)}, not {wanted}",
        "correct it, or download the model again",
    )


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of ``config`` with the sizes that it leaves out, as transformers has them for
    its class. Sizes that are not known stay absent."""
    nested = config.get("text_config")
    found = dict(nested if isinstance(nested, dict) else config)
    kinds = [found.get("model_type"), f"{config.get('model_type')}_text", config.get("model_type")]
    own = next((each for kind in kinds if (each := _class_defaults(str(kind)))), {})
    for keys in _SIZES:
        if all(found.get(key) is None for key in keys):
            found |= {key: own[key] for key in keys if key in own}
    return found


@functools.cache
def _class_defaults(kind: str) -> Mapping[str, int]:
    """Return the whole numbers that are defaults of the configuration class of ``kind``, by name. Searches
    transformers' source, because importing it is slow; {} if there is no such class."""
    name = module_of(kind)
    try:
        tree = ast.parse(source(name, f"configuration_{name}.py"))
    except (SyntaxError, ValueError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            values = dict(_assigned(node))
            if values.get("model_type") == kind:
                return {key: value for key, value in values.items() if type(value) is int}
    return {}


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for each in node.body:
        targets = (
            each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        )
        value = getattr(each, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant):
            yield targets[0].id, value.value
