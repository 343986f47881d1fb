"""Loads one tensor-parallel rank's share of a model, by the tensor-parallel plan in its transformers configuration.

The model is built without memory, its modules are cut to this rank's share, and then only that share is read from the
safetensors files. Embeddings are whole on every rank, since looking up a few rows costs nothing. The output layer is
split over the vocabulary: it is the largest matrix of many models, and only rank 0 needs the logits. Experts are split
by expert. If there are fewer KV heads than ranks, several ranks have the same head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from common.attention.interface import ATTENTION
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.kv.layout import LayerLayout
from common.kv.storage.tensors import DTYPES
from common.model.collective import Collective
from common.model.load import check_complete, quiet_transformers, unloadable
from common.model.parallel_layers import GatheredLinear, SplitExperts, SummedLinear

_COLUMNS, _ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "embedding_rowwise", "embedding_colwise", "replicate")
_EXPERTS = "moe_tp_experts"
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
Range = tuple[int, int]


@dataclass(frozen=True)
class _Cut:
    """The part ``[first, last)`` of dimension ``dim`` of a weight."""

    dim: int
    first: int
    last: int

    def of(self, tensor: Any) -> torch.Tensor:
        """Return this part of ``tensor`` or of a slice of a safetensors file, of which no more is then read."""
        part = tensor[self.first : self.last] if self.dim == 0 else tensor[:, self.first : self.last]
        return part.contiguous()


@dataclass
class Plan:
    """The share of a model that rank ``rank`` of ``size`` holds. ``cuts``: parts of weights, by parameter name.
    ``styles``: how the ranks' shares of a module are combined, and its whole width, by module name. ``experts``: which
    experts are here, by module name. ``head`` is the name of the output layer and ``vocabulary`` its rows on each
    rank."""

    name: str
    rank: int
    size: int
    cuts: dict[str, _Cut] = field(default_factory=dict)
    styles: dict[str, tuple[str, int]] = field(default_factory=dict)
    experts: dict[str, Range] = field(default_factory=dict)
    head: str = ""
    vocabulary: tuple[int, ...] = ()

    def share(self, count: int, what: str) -> Range:
        """Return this rank's equal part of ``count``; StartError if it cannot be divided."""
        if count % self.size:
            raise self.refused(
                f"its {what} cannot be divided among {self.size} ranks", "choose another number of ranks"
            )
        return count // self.size * self.rank, count // self.size * (self.rank + 1)

    def refused(self, why: str, todo: str = "serve it with --tensor-parallel-size 1") -> StartError:
        """Return the error for a model that cannot be split: ``why``, and ``todo`` as advice."""
        return StartError(f"cannot split {self.name} among {self.size} ranks", why, todo)


def make_plan(checkpoint: Checkpoint, model: Any, rank: int, size: int) -> Plan:
    """Return the share of ``model``, which may be on device "meta", for rank ``rank`` of ``size``. Raises StartError if
    its configuration has no plan, or one with an unsupported part, or if its sizes cannot be divided."""
    plan = Plan(checkpoint.name, rank, size)
    config = model.config.get_text_config()
    patterns = getattr(config, "base_model_tp_plan", None)
    if not patterns:
        raise plan.refused(f"transformers has no tensor-parallel plan for {checkpoint.architecture}")
    matchers = [(_matcher(pattern), style) for pattern, style in patterns.items()]
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        style = next((style for matcher, style in matchers if matcher.fullmatch(name)), None)
        if style is None or style in _WHOLE:
            continue
        if style == _EXPERTS:
            _plan_experts(plan, name, module)
        elif style in (*_COLUMNS, *_ROWS) and type(module) is nn.Linear:
            _plan_linear(plan, name, module, style, modules, config)
        else:
            raise plan.refused(f"its plan has {style} for {name} ({type(module).__name__}), which is not supported")
    if not plan.styles:
        raise plan.refused(f"the plan of {checkpoint.architecture} names none of its modules")
    _plan_head(plan, model, config)
    return plan


def _matcher(pattern: str) -> re.Pattern[str]:
    """Return a pattern for full module names; ``*`` in a plan stands for a number."""
    return re.compile(r"(?:.+\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))


def _plan_linear(
    plan: Plan, name: str, linear: nn.Linear, style: str, modules: dict[str, nn.Module], config: Any
) -> None:
    plan.styles[name] = style, linear.in_features if style in _ROWS else linear.out_features
    if style in _ROWS:
        plan.cuts[f"{name}.weight"] = _Cut(
            1, *plan.share(linear.in_features, f"{name} of {linear.in_features} columns")
        )
        return
    parent, _, last = name.rpartition(".")
    if style == "colwise" and hasattr(modules[parent], "layer_idx"):
        plan.share(config.num_attention_heads, f"{config.num_attention_heads} attention heads")
    if style == "colwise" and last in ("k_proj", "v_proj"):
        first, last_row = _kv_rows(plan, linear.out_features, getattr(modules[parent], "head_dim", None), config)
    else:
        first, last_row = plan.share(linear.out_features, f"{name} of {linear.out_features} rows")
    for part in ("weight", "bias") if linear.bias is not None else ("weight",):
        plan.cuts[f"{name}.{part}"] = _Cut(0, first, last_row)


def _kv_rows(plan: Plan, rows: int, dim: int | None, config: Any) -> Range:
    """Return the rows of the keys or values of this rank: those of its heads, or of one head that it has in common with
    other ranks."""
    heads = rows // dim if dim else config.num_key_value_heads
    if heads % plan.size == 0:
        return plan.share(rows, "KV heads")
    if plan.size % heads:
        raise plan.refused(
            f"its {heads} KV heads can neither be divided among {plan.size} ranks nor each be given to the same number",
            "choose another number of ranks",
        )
    head = plan.rank * heads // plan.size
    return rows // heads * head, rows // heads * (head + 1)


def _plan_experts(plan: Plan, name: str, module: Any) -> None:
    count = getattr(module, "num_experts", None)
    parameters = dict(module.named_parameters(recurse=False))
    if count is None or not parameters or any(weight.shape[0] != count for weight in parameters.values()):
        raise plan.refused(f"{name} ({type(module).__name__}) does not have one weight per expert")
    plan.experts[name] = plan.share(count, f"{count} experts")
    plan.styles[name] = _EXPERTS, count
    for part in parameters:
        plan.cuts[f"{name}.{part}"] = _Cut(0, *plan.experts[name])


def _plan_head(plan: Plan, model: Any, config: Any) -> None:
    """Split the output layer over the vocabulary. One that is tied to the embedding is cut after loading."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if type(head) is not nn.Linear:
        return
    rows, each = head.out_features, -(-head.out_features // plan.size)
    bounds = [min(rows, each * rank) for rank in range(plan.size + 1)]
    plan.head, plan.vocabulary = name, tuple(last - first for first, last in pairwise(bounds))
    if 0 in plan.vocabulary:
        raise plan.refused(f"its vocabulary of {rows} is too small", "choose another number of ranks")
    if not (config.tie_word_embeddings or model.config.tie_word_embeddings):
        for part in ("weight", "bias") if head.bias is not None else ("weight",):
            plan.cuts[f"{name}.{part}"] = _Cut(0, bounds[plan.rank], bounds[plan.rank + 1])


# -- loading ----------------------------------------------------------------------------------------------------------


def load_share(
    checkpoint: Checkpoint,
    dtype: str,
    collective: Collective,
    trust_remote_code: bool = False,
    config: Any = None,
) -> tuple[nn.Module, Plan]:
    """Return this rank's share of the model in ``dtype``, in evaluation mode, calling our attention and summing over
    ``collective``. ``config``: its configuration, if not the checkpoint's. StartError if the model cannot be split or
    loaded."""
    transformers = quiet_transformers()
    auto = transformers.AutoModelForCausalLM
    how = {"attn_implementation": ATTENTION, "dtype": DTYPES[dtype]}
    try:
        config = config or transformers.AutoConfig.from_pretrained(
            checkpoint.model_directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
        with torch.device("meta"):
            whole = auto.from_config(config, trust_remote_code=trust_remote_code, **how)
        plan = make_plan(checkpoint, whole, collective.rank, collective.size)
        model, info = _local_class(type(whole), plan).from_pretrained(
            None, config=config, state_dict=dict(_weights(checkpoint, plan)), output_loading_info=True,
            ignore_mismatched_sizes=True, **how,
        )  # fmt: skip
    except StartError:
        raise
    except Exception as error:  # configuration and modelling code may raise anything
        raise unloadable(checkpoint, error) from error
    if misfits := sorted(map(str, info.get("mismatched_keys") or ())):
        raise plan.refused(f"{len(misfits)} weights do not have the shape that its plan expects, such as {misfits[0]}")
    check_complete(checkpoint, info)
    frozen: nn.Module = model.eval().requires_grad_(False)
    _connect(frozen, plan, collective)
    return frozen, plan


def _local_class(whole: Any, plan: Plan) -> Any:
    """Return a subclass of the model's class whose instances are cut to this rank's share before weights are loaded."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - becomes the method
        whole.__init__(self, config, *args, **kwargs)
        _shrink(self, plan)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def _shrink(model: nn.Module, plan: Plan) -> None:
    """Cut the parameters, which have no memory yet, and update the sizes that modules store."""
    for name, cut in plan.cuts.items():
        path, _, part = name.rpartition(".")
        module: Any = model.get_submodule(path)
        setattr(module, part, nn.Parameter(cut.of(getattr(module, part)), requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    for name, (first, last) in plan.experts.items():
        experts: Any = model.get_submodule(name)
        experts.num_experts = last - first
        experts._is_expert_parallel = True  # transformers then skips an index beyond the last expert in all products
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups"):  # for eager attention
            query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
            if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
                module.num_key_value_groups = query.out_features // key.out_features


class _WeightSlice:
    """A weight of which only a part is read, and only when transformers asks for it."""

    def __init__(self, slice_: Any, cut: _Cut) -> None:
        self._slice, self._cut = slice_, cut

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._cut.of(self._slice)

    def get_shape(self) -> list[int]:
        shape = list(self._slice.get_shape())
        shape[self._cut.dim] = self._cut.last - self._cut.first
        return shape

    def get_dtype(self) -> str:
        return str(self._slice.get_dtype())


def _weights(checkpoint: Checkpoint, plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield the weights of this rank by their names in the checkpoint, not read yet. Experts that the checkpoint stores
    under one name each are renumbered from 0."""
    ranges = {*plan.experts.values()}
    if len(ranges) > 1:
        raise plan.refused("its layers have different numbers of experts")
    for path in checkpoint.weight_files:
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 - not a dict
            if ranges and (found := _OF_EXPERT.fullmatch(name)):
                ((first, last),) = ranges
                if first <= int(found[2]) < last:
                    yield f"{found[1]}.{int(found[2]) - first}.{found[3]}", file.get_slice(name)
            elif (cut := _cut_of(plan, name)) is not None:
                yield name, _WeightSlice(file.get_slice(name), cut)
            else:
                yield name, file.get_slice(name)


def _cut_of(plan: Plan, name: str) -> _Cut | None:
    """Return the cut of a weight, which the checkpoint may name without the prefix of the base model. If the model
    renames it in another way, no cut is found: the whole weight does not fit, and loading is refused."""
    return plan.cuts.get(name) or plan.cuts.get(f"model.{name}")


def _connect(model: nn.Module, plan: Plan, collective: Collective) -> None:
    """Replace the modules behind which the ranks' shares are combined."""
    for name, (style, width) in plan.styles.items():
        path, _, last = name.rpartition(".")
        module: Any = model.get_submodule(name)
        if style in _ROWS:
            columns = plan.share(width, "columns") if style == "rowwise_split_input" else None
            module = SummedLinear(module, collective, columns)
        elif style == "colwise_gather_output":
            module = GatheredLinear(module, collective, [width // plan.size] * plan.size)
        elif style == _EXPERTS:
            module = SplitExperts(module, collective, plan.experts[name])
        setattr(model.get_submodule(path), last, module)
    if plan.head:
        path, _, last = plan.head.rpartition(".")
        head = _cut_head(model.get_submodule(plan.head), plan)
        setattr(model.get_submodule(path), last, GatheredLinear(head, collective, plan.vocabulary, root_only=True))


def _cut_head(head: Any, plan: Plan) -> nn.Linear:
    """Return this rank's rows of the output layer; of one tied to the embedding as a view of it."""
    first = sum(plan.vocabulary[: plan.rank])
    last = first + plan.vocabulary[plan.rank]
    weight, bias = head.weight, head.bias
    if weight.shape[0] == sum(plan.vocabulary):
        weight, bias = weight[first:last], None if bias is None else bias[first:last]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


# -- KV ---------------------------------------------------------------------------------------------------------------


def whole_layers(
    checkpoint: Checkpoint, plan: Plan, layers: tuple[LayerLayout, ...]
) -> tuple[tuple[LayerLayout, ...], int]:
    """Return the KV shape of each layer of the whole model, and the number of shards in which a pool holds its heads,
    from the shapes ``layers`` that this rank has. StartError if they do not fit together.

    There are as many shards as ranks, fewer if ranks have heads in common, and one if each has all heads.
    """
    whole = checkpoint.kv_layers()
    if whole is None or len(whole) != len(layers):
        raise plan.refused("its configuration does not tell the shape of its keys and values")
    shards = {all_.kv_heads // here.kv_heads for all_, here in zip(whole, layers, strict=True)}
    count = max(shards)
    expected = tuple(LayerLayout(each.kv_heads * count, each.k_dim, each.v_dim) for each in layers)
    if len(shards) > 1 or expected != whole or count < 1 or plan.size % count:
        raise plan.refused("its layers' keys and values are not divided alike")
    return whole, count


@torch.inference_mode()
def whole_peaks(
    collective: Collective,
    peaks: Sequence[tuple[Sequence[float], Sequence[float]]],
    shards: int,
    where: torch.device,
) -> list[tuple[list[float], list[float]]]:
    """Return the largest magnitudes of the keys and of the values of all KV heads, per layer, from those that each rank
    has seen of its own heads; all ranks get the same. They compute on ``where``. Of ranks that have heads in common,
    the first one's count."""
    own = torch.tensor([peak for layer in peaks for part in layer for peak in part], device=where)[None]
    parts = collective.gather(own, [own.shape[1]] * collective.size).view(collective.size, -1)
    rows = parts[:: collective.size // shards].cpu()
    found: list[tuple[list[float], list[float]]] = []
    at = 0
    for k, v in peaks:
        middle, end = at + len(k), at + len(k) + len(v)
        found.append((rows[:, at:middle].flatten().tolist(), rows[:, middle:end].flatten().tolist()))
        at = end
    return found


def shard_of(plan: Plan, shards: int) -> int:
    """Return the shard of the pool in which this rank's heads are; other ranks may have the same."""
    return plan.rank * shards // plan.size
