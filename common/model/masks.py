"""What a model's masks allow beyond the tokens that its probe runs.

transformers' eager attention obeys a mask, ours obeys :class:`common.attention.interface.Params`. A model can keep a
sliding window in the mask alone, and a window is longer than any probe that starts fast. transformers makes masks from
functions of two positions. The functions are recorded in the eager run and then evaluated at positions around every
window, up to the longest context.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from common.attention.interface import Params

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position), int64 [n] each, to bool [n]: whether the query sees the key."""

_recording = threading.local()
"""Has ``made`` while a thread records; ranks of one model may be threads that wait for each other."""


@dataclass
class MaskRecorder:
    """The functions that made a model's masks: ``rules`` by layer, as far as layers were given such a mask."""

    rules: dict[int, Rule] = field(default_factory=dict)
    _made: list[tuple[torch.Tensor, Rule]] = field(default_factory=list)

    @contextlib.contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Record the masks of runs of ``model`` in this thread with transformers' eager attention."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _eager_mask
        layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        hooks = [layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in layers]
        _recording.made = self._made
        try:
            yield
        finally:
            _recording.made = None
            for hook in hooks:
                hook.remove()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the rule of the mask that a layer is called with."""
        for value in (*args, *kwargs.values()):
            rule = next((rule for mask, rule in self._made if mask is value), None)
            if rule is not None:
                self.rules[int(module.layer_idx)] = rule  # type: ignore[arg-type]


def _eager_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Make the mask of transformers' eager attention, and note its function if this thread records."""
    from transformers.masking_utils import eager_mask

    mask: torch.Tensor = eager_mask(*args, **kwargs)
    if (made := getattr(_recording, "made", None)) is not None:
        made.append((mask, kwargs["mask_function"]))
    return mask


def difference(rule: Rule, params: Params, positions: int, where: torch.device) -> str:
    """Return in words how a mask differs from causal attention with ``params`` in a context of ``positions`` tokens,
    "" if it does not or if ``rule`` is defined for the tokens of the recorded run only.

    Masks are compared as a whole at the queries next to the ends of the windows. The windows are that of ``params`` and
    the one that the mask has at the last position."""
    try:
        seen = _seen(rule, positions - 1, positions, where)
        windows = {int(seen.sum()), params.window or positions}
        edges = {offset + width for width in windows for offset in (-1, 0, 1, width)} | {1, positions // 2}
        queries = [*sorted(edge for edge in edges if 0 <= edge < positions - 1), positions - 1]
        for query in queries:
            if difference := _at(rule, params, query, positions, where):
                return difference
    except (IndexError, RuntimeError):  # it looks up tokens of the recorded run
        return ""
    return ""


def _at(rule: Rule, params: Params, query: int, positions: int, where: torch.device) -> str:
    """Return how the mask of the token at position ``query`` differs, "" if it does not."""
    seen = _seen(rule, query, positions, where)
    if bool(seen[query + 1 :].any()):
        return "tokens see later ones"
    expected = torch.ones(query + 1, dtype=torch.bool, device=where)
    if params.window is not None:
        expected[: max(query + 1 - params.window, 0)] = False
    if torch.equal(seen[: query + 1], expected):
        return ""
    count = int(seen[: query + 1].sum())
    passed = "none" if params.window is None else f"{params.window:,}"
    return f"its mask shows the token at position {query:,} {count:,} tokens, but the window it passes is {passed}"


def _seen(rule: Rule, query: int, positions: int, where: torch.device) -> torch.Tensor:
    """Return which of ``positions`` the token at position ``query`` sees, bool [positions]."""
    keys = torch.arange(positions, device=where)
    zeros = torch.zeros_like(keys)
    return rule(zeros, zeros, zeros + query, keys).expand(positions)


def declared_window(config: Any, positions: int, calls: Sequence[Params]) -> int | None:
    """Return a sliding window below ``positions`` that the configuration names and no layer passes to attention."""
    window = getattr(config, "sliding_window", None)
    if type(window) is not int or not 0 < window < positions or any(call.window == window for call in calls):
        return None
    return window
