"""What a reader of quantized checkpoints hands to the loader, and the safetensors files that most of them read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open

from common.core.errors import StartError
from common.quantization.weight import EXPANDED, QuantizedWeight

Make = Callable[[], QuantizedWeight]
_CODES = frozenset(("I8", "U8", "I32"))
_CODED = frozenset(("weight", "weight_packed", "qweight", "qzeros"))
"""Last parts of names of tensors that, of these types, have codes and not numbers."""
_Read = TypeVar("_Read", QuantizedWeight, list[QuantizedWeight])


class Lazy(Protocol):
    """A tensor that is read when it is indexed: by ``[...]``, or by slices."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...

    def get_shape(self) -> list[int]: ...


class WeightSource:
    """The weights of a quantized checkpoint, by the names that the unquantized one has in transformers.

    ``compact``: returns a matrix that stays quantized ("model.layers.0.self_attn.q_proj.weight",
    "…mlp.experts.3.up_proj.weight"). ``stacked``: returns one matrix [out, in] per expert of a tensor that the model
    has for all experts ("…mlp.experts.gate_up_proj"). ``plain``: all other tensors, read when they are indexed.
    Reading raises StartError if the tensors do not fit together.

    ``unrounded``: the tensors behind ``compact`` if these are rounded by us, for layers that do not take them; empty if
    the checkpoint has only the quantized ones.
    """

    unrounded: Mapping[str, Lazy] = {}

    def __init__(
        self,
        compact: Mapping[str, Make],
        plain: Mapping[str, Lazy],
        stacked: Mapping[str, Callable[[], list[QuantizedWeight]]] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._compact = {name: self._counted(name, make) for name, make in compact.items()}
        self._stacked = {name: self._counted(name, make) for name, make in (stacked or {}).items()}
        self._plain, self._notes = plain, notes
        self._expanded: Counter[str] = Counter()

    def compact(self) -> Mapping[str, Make]:
        return self._compact

    def stacked(self) -> Mapping[str, Callable[[], list[QuantizedWeight]]]:
        return self._stacked

    def plain(self) -> Mapping[str, Lazy]:
        return self._plain

    @property
    def notes(self) -> list[str]:
        """What is not kept as it is in the checkpoint, in words: complete when all weights have been read."""
        expanded = [f"{_count(count, 'weight')} in {source}" for source, count in sorted(self._expanded.items())]
        return [*self._notes, *expanded]

    def _counted(self, name: str, make: Callable[[], _Read]) -> Callable[[], _Read]:
        def read() -> _Read:
            try:
                found = make()
            except (ValueError, RuntimeError, IndexError) as error:
                raise damaged(name, str(error)) from error
            for weight in _each(found):
                if weight.source.endswith(EXPANDED):
                    self._expanded[weight.source] += 1
            return found

        return read


def _each(found: QuantizedWeight | list[QuantizedWeight]) -> list[QuantizedWeight]:
    return [found] if isinstance(found, QuantizedWeight) else found


def damaged(name: str, why: str) -> StartError:
    """Return the error for a tensor that cannot be read."""
    return StartError(f"cannot read the weight {name}", why, "download the model again, or use another format of it")


class TensorFiles:
    """The tensors of the safetensors files of a checkpoint. Raises StartError if a file cannot be read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except Exception as error:  # its errors have no common base but Exception
                raise StartError(f"cannot read {path}", str(error), "download the model again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> Iterable[str]:
        return self._files

    def lazy(self, name: str) -> Lazy:
        """Return a tensor that is read when it is indexed."""
        return self._files[name].get_slice(name)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own: the file may change while the model is served. Raises ValueError if
        there is none of this name."""
        if name not in self:
            raise ValueError(f"there is no tensor {name}")
        return self._files[name].get_tensor(name).clone()

    def find(self, name: str) -> torch.Tensor | None:
        """Return a tensor, None if there is none of this name."""
        return self.read(name) if name in self else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as in the file: "F16", "I32", "F8_E4M3"."""
        return str(self._files[name].get_slice(name).get_dtype())

    def modules(self, suffix: str) -> list[str]:
        """Return the names of the modules that have a tensor ``.suffix``."""
        end = f".{suffix}"
        return [name.removesuffix(end) for name in self._files if name.endswith(end)]

    def rest(self, used: Iterable[str], dropped: Sequence[str] = ()) -> tuple[dict[str, Lazy], list[str]]:
        """Return all tensors that are not ``used``, and notes on those that are left out since their name ends in one
        of ``dropped``. Raises StartError if one of the others has codes instead of numbers."""
        taken, left, counts = set(used), dict[str, Lazy](), Counter[str]()
        for name in self._files:
            if name in taken:
                continue
            if end := next((each for each in dropped if name.endswith(f".{each}")), ""):
                counts[end] += 1
            else:
                kind = self.dtype(name)
                if kind.startswith("F8") or (kind in _CODES and name.rpartition(".")[2] in _CODED):
                    raise damaged(name, f"it is of type {kind}, without the tensors that say what it stands for")
                left[name] = self.lazy(name)
        return left, [f"{_count(count, 'tensor')} {end} not used" for end, count in sorted(counts.items())]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
