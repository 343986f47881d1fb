"""Which architectures can be served, decided from config.json and transformers' source before anything is imported or
downloaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from common.checkpoint.context import scalings
from common.checkpoint.formats import read_format
from common.checkpoint.refused_types import REFUSED_TYPES, STATE
from common.checkpoint.transformers_source import module_of, source
from common.checkpoint.values import shown
from common.core.errors import StartError

_SEQ_TO_SEQ = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
_IMAGES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
_OLD_NAMES = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon"}
"""Model types of checkpoints that are older than the code in transformers."""
_DECODERS = "choose a decoder-only model (Llama, Qwen, Mistral, Gemma, Phi, ...)"


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first class name in ``architectures``; without any, the causal language model that transformers has
    for ``model_type``, "" if it has none."""
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    classes = causal_models()
    return next(iter(classes.get(str(config.get("model_type", "")), ())), "") if classes else ""


def refuse_unsupported(model: str, config: dict[str, Any], trust_remote_code: bool = False) -> None:
    """Raise StartError unless ``config`` is of a decoder-only causal language model that transformers supports, with
    weights in a format that is read."""
    read_format(config, model)
    kind, architecture = str(config.get("model_type") or ""), architecture_of(config)
    name, why, todo = architecture or kind, None, _DECODERS
    classes = causal_models()
    known = classes is None or any(architecture in each for each in classes.values())
    own_code = trust_remote_code and "auto_map" in config
    if config.get("is_encoder_decoder") or (not known and not own_code and _is_listed(architecture, _SEQ_TO_SEQ)):
        why = f"{name} is an encoder-decoder model"
    elif kind in REFUSED_TYPES:
        why = f"{name} {REFUSED_TYPES[kind]}"
    elif "linear_attention" in (config.get("layer_types") or ()):
        why = f"{name} {STATE}"
    elif (config.get("text_config") or config).get("attention_chunk_size"):
        why = f"{name} attends in chunks"
    elif not own_code and _attends_by_itself(_OLD_NAMES.get(kind, kind)):
        why = f"transformers' code of {name} has an attention function of its own, which cannot use paged KV"
    elif not trust_remote_code and not known and _is_listed(architecture, _IMAGES):
        why, todo = f"{name} reads images, which is not served yet", "choose the text-only model of its family"
    elif not trust_remote_code and not known and "auto_map" in config:
        why = f"{name} needs Python code that comes with the checkpoint"
        todo = "give --trust-remote-code if you trust this code: it will run on this machine"
    elif not trust_remote_code and not known:
        why = f"{name or 'its architecture'} is not a decoder-only language model in transformers"
    elif not own_code and (unknown := _unknown_rotation(kind, config)):
        why, todo = f"its rotary embedding is of the type {unknown}, which transformers lacks", "correct config.json"
    elif not kind and not own_code:  # transformers chooses the configuration's class by it
        why, todo = "its config.json has no model_type", "add it, or download the model again"
    if why:
        raise StartError(f"cannot serve {model}", why, todo)


def _unknown_rotation(kind: str, config: Mapping[str, Any]) -> str:
    """Return the first type of rotary scaling that neither transformers nor its code of ``kind`` names, "" if there is
    none."""
    table = re.search(r"\nROPE_INIT_FUNCTIONS\b.*= \{(.*?)\n\}", source("..", "modeling_rope_utils.py"), re.DOTALL)
    if table is None:
        return ""
    name = module_of(kind)
    own = "".join(source(name, f"{part}_{name}.py") for part in ("configuration", "modeling"))
    known = {"default", "mrope", *re.findall(r'"(\w+)":', table[1])}
    types = (each.get("rope_type", each.get("type")) for each in scalings(config.get("text_config") or config))
    return next((shown(each) for each in types if each and str(each) not in known and f'"{each}"' not in own), "")


def causal_models() -> dict[str, tuple[str, ...]] | None:
    """Return the classes of transformers' causal language models by model type. Searches its source, because importing
    it is slow; None if the source is not as expected."""
    return _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def _is_listed(architecture: str, tables: tuple[str, ...]) -> bool:
    return any(architecture in names for table in tables for names in (_classes(table) or {}).values())


@functools.cache
def _classes(table: str) -> dict[str, tuple[str, ...]] | None:
    """Return the classes by model type in a table of transformers' automatic classes."""
    _, found, rest = source("auto", "modeling_auto.py").partition(f"\n{table} = ")
    if not found:
        return None
    entries = re.findall(r'\(\s*"([\w-]+)",\s*(\([^)]*\)|"\w+")\s*,?\s*\)', rest.partition("\n)\n")[0])
    return {kind: tuple(re.findall(r'"(\w+)"', names)) for kind, names in entries} or None


def _attends_by_itself(kind: str) -> bool:
    """Return whether the modelling code of ``kind`` has attention layers that ignore transformers' registry of
    attention functions."""
    name = module_of(kind)
    text = source(name, f"modeling_{name}.py")
    own = re.search(r"^class (?!\w*Vision)\w*Attention\w*\(", text, re.MULTILINE)
    return own is not None and "ALL_ATTENTION_FUNCTIONS" not in text
