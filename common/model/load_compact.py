"""Loads a quantized checkpoint as a transformers model whose large matrices stay quantized.

transformers builds the model and loads everything else. The modules of quantized matrices are emptied before that, so
that they have no parameters to load, and are replaced afterwards. Matrices that the model holds in a module of another
kind are dequantized.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from common.attention.interface import ATTENTION
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.kv.storage.tensors import DTYPES
from common.model.compact import CompactEmbedding, CompactLinear, Part
from common.model.compact_experts import CompactExperts, takes_compact
from common.model.compact_shapes import Experts, fitting, fitting_experts
from common.model.load import check_complete, quiet_transformers, unloadable
from common.model.round_linears import refine
from common.quantization.cache import Entry, Packed, kept
from common.quantization.panels import Panels
from common.quantization.source import Lazy, Make, WeightSource
from common.quantization.weight import QuantizedWeight

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
SHARED = "packed weights are mapped from the cache, and shared by the workers of this machine"


@dataclass
class CompactModel:
    """A loaded ``model``; ``formats`` counts its quantized matrices by format, ``notes`` say what is not kept as it is
    in the checkpoint."""

    model: nn.Module
    formats: Mapping[str, int]
    notes: list[str]


@dataclass
class _Places:
    """Where the weights of a checkpoint go, by the names of modules: ``linears``, ``embeddings``, and of ``experts``
    both projections. ``plain`` is what transformers loads, by the names of the checkpoint; ``dense`` is the quantized
    part of it. The output layer ``tied`` has the embedding's weight."""

    linears: dict[str, Make] = field(default_factory=dict)
    embeddings: dict[str, Make] = field(default_factory=dict)
    experts: dict[str, dict[str, Experts]] = field(default_factory=dict)
    plain: dict[str, Lazy] = field(default_factory=dict)
    tied: str = ""
    dense: list[str] = field(default_factory=list)


def load_compact(
    checkpoint: Checkpoint,
    source: WeightSource,
    dtype: str,
    trust_remote_code: bool = False,
    *,
    exact: bool,
    where: torch.device,
    key: str = "",
) -> CompactModel:
    """Return the model on ``where``, in evaluation mode, calling our attention; what is not quantized is in ``dtype``.
    Products are ``exact``, or integer where the format allows it. With a ``key``, which tells the contents
    of the checkpoint's weights, packed matrices are mapped from a file (:mod:`common.quantization.cache`). StartError
    if it cannot be loaded."""
    how = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION}
    try:
        config, whole = _without_weights(checkpoint, trust_remote_code, how)
        places = _find_places(whole, source)
        if places.tied:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        model, info = _emptied_class(type(whole), places).from_pretrained(
            None, config=config, state_dict=places.plain, output_loading_info=True, ignore_mismatched_sizes=True, **how
        )
    except StartError:
        raise
    except Exception as error:  # configuration and modelling code may raise anything
        raise unloadable(checkpoint, error) from error
    check_complete(checkpoint, info)
    frozen: nn.Module = model.eval().requires_grad_(False)
    packed = _kept(checkpoint, places, source, key) if key else None
    entries = _read(places) if packed is None else packed.entries
    formats = _fill(frozen.to(where), places, entries, DTYPES[dtype], exact, where)
    if not exact:
        refine(frozen)
    notes = source.notes if packed is None else [*packed.notes, SHARED]
    return CompactModel(frozen, formats, [*notes, *_remarks(places, info)])


def _kept(checkpoint: Checkpoint, places: _Places, source: WeightSource, key: str) -> Packed | None:
    """Return the quantized matrices from the file of packed weights; None if there can be none."""
    names = [
        *places.embeddings,
        *places.linears,
        *(f"{each}/{part}" for each, parts in places.experts.items() for part in parts),
    ]
    whole = "|".join([key, checkpoint.fingerprint, *names])
    return kept(whole, lambda: _read(places), lambda: source.notes, checkpoint.bytes_in("bfloat16"))


def not_taken(checkpoint: Checkpoint, source: WeightSource, trust_remote_code: bool = False) -> set[str]:
    """Return the names of the matrices of ``source`` for which the model has no layer that takes quantized ones. Raises
    StartError if transformers cannot make the model."""
    try:
        _, whole = _without_weights(checkpoint, trust_remote_code, {})
        return set(_find_places(whole, WeightSource(source.compact(), source.plain(), source.stacked())).dense)
    except Exception as error:  # configuration and modelling code may raise anything
        raise unloadable(checkpoint, error) from error


def _without_weights(checkpoint: Checkpoint, trust_remote_code: bool, how: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the configuration, and the model on device "meta"."""
    transformers = quiet_transformers()
    config = _unquantized(
        transformers.AutoConfig.from_pretrained(
            checkpoint.model_directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    )
    with torch.device("meta"):
        return config, transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **how)


def _unquantized(config: Any) -> Any:
    """Return a copy of ``config`` that says nothing of quantization: transformers would ask for other packages."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config


def _remarks(places: _Places, info: Mapping[str, Any]) -> Iterator[str]:
    if places.dense:
        yield f"{len(places.dense)} weights dequantized, as {places.dense[0]}: its layer does not take quantized ones"
    if unused := sorted(info.get("unexpected_keys") or ()):
        yield f"{len(unused)} tensors are not used, as {unused[0]}"


# -- places -----------------------------------------------------------------------------------------------------------


def _find_places(whole: Any, source: WeightSource) -> _Places:
    """Return where the weights of ``source`` go in the model ``whole``, which is on device "meta"."""
    places, names = _Places(plain=dict(source.plain())), _Names(whole)
    merged: dict[str, dict[str, list[tuple[str, Make]]]] = {}
    for key, make in sorted(source.compact().items(), key=lambda item: names.order(item[0])):
        name, pattern = names.find(key)
        if pattern is not None and names.merges(name, pattern):
            merged.setdefault(name, {}).setdefault(pattern, []).append((key, make))
        elif pattern is not None or not _place(places, whole, name, make):
            _place_plain(places, source, {key: _Dequantized(make)})
    of_experts: dict[str, tuple[Experts | None, dict[str, Lazy]]] = {}
    for name, by_pattern in merged.items():
        dense: dict[str, Lazy] = {key: _Dequantized(make) for each in by_pattern.values() for key, make in each}
        of_experts[name] = _joined([by_pattern.get(each) for each in names.patterns(by_pattern)]), dense
    for key, read in source.stacked().items():
        name, _ = names.find(key)
        transposed = getattr(whole.get_submodule(name.rpartition(".")[0]), "is_transposed", False)
        of_experts[name] = _alone(read), {key: _Stacked(read, transposed)}
    _place_experts(places, whole, source, of_experts)
    _tie(places, whole)
    return places


def _place(places: _Places, whole: nn.Module, name: str, make: Make) -> bool:
    """Add a matrix to ``places``, unless the module of the parameter ``name`` does not take one."""
    path, _, part = name.rpartition(".")
    module = _submodule(whole, path)
    if part != "weight" or module is None:
        return False
    if type(module) is nn.Linear:
        places.linears[path] = fitting(name, make, module.weight)
    elif isinstance(module, nn.Embedding) and module is whole.get_input_embeddings():  # type: ignore[operator]
        places.embeddings[path] = fitting(name, make, module.weight)
    else:
        return False
    return True


def _place_experts(
    places: _Places,
    whole: nn.Module,
    source: WeightSource,
    of_experts: Mapping[str, tuple[Experts | None, dict[str, Lazy]]],
) -> None:
    """Add the experts' projections to ``places``: compact if both are, in a module that takes them."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in of_experts):
        both = {part: of_experts.get(f"{path}.{part}") for part in (_GATE_UP, _DOWN)}
        read = {part: each[0] for part, each in both.items() if each is not None and each[0] is not None}
        if len(read) == 2 and takes_compact(_submodule(whole, path)):
            places.experts[path] = {
                part: fitting_experts(f"{path}.{part}", each, whole.get_submodule(path)) for part, each in read.items()
            }
            continue
        for name, (_, dense) in of_experts.items():
            if name.rpartition(".")[0] == path:
                _place_plain(places, source, dense)


def _place_plain(places: _Places, source: WeightSource, dense: Mapping[str, Lazy]) -> None:
    """Let transformers load these weights: as they were before rounding, if it was done by us."""
    places.plain.update({key: source.unrounded.get(key, each) for key, each in dense.items()})
    places.dense += [key for key in dense if key not in source.unrounded]


def _joined(parts: list[list[tuple[str, Make]] | None]) -> Experts | None:
    """Return the experts of which ``parts`` are the matrices, one list per matrix; None if some are not quantized."""
    found = [each for each in parts if each is not None]
    if len(found) != len(parts) or len({len(each) for each in found}) != 1:
        return None
    return lambda: ([make() for _, make in expert] for expert in zip(*found, strict=True))


def _alone(read: Callable[[], list[QuantizedWeight]]) -> Experts:
    return lambda: ([weight] for weight in read())


def _tie(places: _Places, whole: Any) -> None:
    """Give an output layer that is tied to a quantized embedding the same weight."""
    head = whole.get_output_embeddings()
    tied = whole.config.tie_word_embeddings or whole.config.get_text_config().tie_word_embeddings
    if not places.embeddings or head is None or not tied:
        return
    name = next(name for name, module in whole.named_modules() if module is head)
    if name not in places.linears:
        places.tied = name


class _Names:
    """The names that a model's loading gives to a checkpoint's weights."""

    def __init__(self, whole: Any) -> None:
        from transformers import conversion_mapping, core_model_loading

        self._rename, self.order = core_model_loading.rename_source_key, core_model_loading.dot_natural_key
        self._usual = core_model_loading.MergeModulelist, core_model_loading.Concatenate
        found = conversion_mapping.get_model_conversion_mapping(whole)
        self._renamings = [each for each in found if isinstance(each, core_model_loading.WeightRenaming)]
        self._converters = [each for each in found if isinstance(each, core_model_loading.WeightConverter)]
        self._of_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._prefix, self._state = whole.base_model_prefix, whole.state_dict()

    def find(self, key: str) -> tuple[str, str | None]:
        """Return the parameter's name, and the pattern of the conversion that makes it of several weights, if any."""
        name, pattern = self._rename(key, self._renamings, self._converters, self._prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = self._rename(key, [], [], self._prefix, self._state)
        return name, pattern

    def merges(self, name: str, pattern: str) -> bool:
        """Return whether a conversion only stacks experts and joins their projections."""
        operations = self._of_pattern[pattern].operations
        return name in self._state and all(isinstance(each, self._usual) for each in operations)

    def patterns(self, some: Iterable[str]) -> list[str]:
        """Return all patterns of the conversion to which ``some`` belong, in their order."""
        patterns: list[str] = self._of_pattern[next(iter(some))].source_patterns
        return patterns


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


class _Dequantized:
    """A quantized matrix that is dequantized when it is read."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._make().dequantize()[index]

    def get_shape(self) -> list[int]:
        return list(self._make().shape)


class _Stacked:
    """The quantized matrices of all experts, dequantized when they are read, as one tensor."""

    def __init__(self, read: Callable[[], list[QuantizedWeight]], transposed: bool) -> None:
        self._read, self._transposed = read, transposed

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.stack([weight.dequantize() for weight in self._read()])
        return (whole.transpose(1, 2) if self._transposed else whole)[index]

    def get_shape(self) -> list[int]:
        return list(self[...].shape)


# -- modules ----------------------------------------------------------------------------------------------------------


class _Slot(nn.Module):
    """Stands for a linear layer until its weight is read; has its bias."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)


class _CompactLookup(nn.Embedding):
    """Looks rows up in a quantized weight; for subclasses of embeddings, which change what is looked up."""

    rows: CompactEmbedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(ids)
        return found


def _emptied_class(whole: Any, places: _Places) -> Any:
    """Return a subclass of the model's class whose instances have no parameters for the quantized matrices."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - becomes the method
        whole.__init__(self, config, *args, **kwargs)
        for name in (*places.linears, *([places.tied] if places.tied else ())):
            _replace(self, name, _Slot(self.get_submodule(name).bias))
        for name in places.embeddings:
            _empty(self.get_submodule(name), "weight")
        for name in places.experts:
            _empty(self.get_submodule(name), _GATE_UP, _DOWN)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, module)


def _empty(module: nn.Module, *names: str) -> None:
    """Make parameters of ``module`` tensors without memory, which are not loaded."""
    for name in names:
        weight = module._parameters.pop(name)
        assert weight is not None
        setattr(module, name, torch.empty(weight.shape, dtype=weight.dtype, device="meta"))


def _read(places: _Places) -> Iterator[Entry]:
    """Read all quantized matrices, one after the other."""
    for name, make in (*places.embeddings.items(), *places.linears.items()):
        yield Entry(name, make())
    for name, parts in places.experts.items():
        for part, read in parts.items():
            for expert, weights in enumerate(read()):
                yield from (Entry(name, weight, part, expert) for weight in weights)


def _fill(
    model: nn.Module, places: _Places, entries: Iterable[Entry], dtype: torch.dtype, exact: bool, where: torch.device
) -> Mapping[str, int]:
    """Put the quantized matrices into ``model``, one module after the other; return their number by format."""
    formats: dict[str, int] = {}
    experts: dict[str, dict[str, list[CompactLinear]]] = {}
    for (name, part, _), group in groupby(entries, lambda entry: (entry.module, entry.part, entry.expert)):
        weights = [_moved(entry.weight, where) for entry in group]
        for weight in weights:
            formats[weight.source] = formats.get(weight.source, 0) + 1
        if part:
            experts.setdefault(name, {}).setdefault(part, []).append(_joined_linear(weights, dtype, exact))
        elif name in places.embeddings:
            _set_embedding(model, name, weights[0], dtype)
            if places.tied:
                _set_linear(model, places.tied, weights[0], dtype, exact)
        else:
            _set_linear(model, name, weights[0], dtype, exact)
    for name, layers in experts.items():
        _replace(model, name, CompactExperts(model.get_submodule(name), layers[_GATE_UP], layers[_DOWN]))
    return formats


def _set_embedding(model: nn.Module, name: str, weight: Part, dtype: torch.dtype) -> None:
    module: Any = model.get_submodule(name)
    if type(module) is nn.Embedding:
        _replace(model, name, CompactEmbedding(weight, dtype))
        return
    module.rows = CompactEmbedding(weight, dtype)
    module.__class__ = type(type(module).__name__, (type(module), _CompactLookup), {})


def _moved(weight: Part, where: torch.device) -> Part:
    if where.type == "cpu" or isinstance(weight, Panels):
        return weight
    moved: dict[str, Any] = {name: tensor.to(where) for name, tensor in weight.tensors().items()}
    return replace(weight, **moved)


def _set_linear(model: nn.Module, name: str, weight: Part, dtype: torch.dtype, exact: bool) -> None:
    bias: Any = model.get_submodule(name).bias
    owned = None if bias is None else bias.detach().clone()  # the loaded one may lie in a mapped file
    _replace(model, name, CompactLinear(weight, owned, dtype, exact=exact))


def _joined_linear(weights: list[Part], dtype: torch.dtype, exact: bool) -> CompactLinear:
    return CompactLinear.joined(weights, [None] * len(weights), dtype, exact=exact)
