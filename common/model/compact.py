"""Linear layers and embeddings whose weights stay quantized.

Products are *exact* (dequantized weights, activations as they are) or *integer* (activations in 8 bits, too). Kernels
in C compute both from panels (:mod:`common.quantization.panels`), on GPUs one in Triton computes exact ones from the
codes (:mod:`common.kernels.triton.groups`). Without them torch does: some rows at a time are dequantized in each
product, which is slow. Integer products are computed there in float32 on the
rounded activations, which are the same numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from common.kernels import cpu, triton
from common.model import linears
from common.quantization.panels import PANEL, Panels
from common.quantization.weight import QuantizedWeight

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Activations that a gated layer can apply, by transformers' names."""
SMALLEST_GROUP = 32
"""Fewest columns of an activation that share a scale."""
TERM_RATIO = 254
"""``TERM_RATIO`` of groups.h: steps of the second of two terms in one of the first."""
SMALLEST_INPUT = 1e-36
"""``SMALLEST_INPUT`` of groups.h: activations of a group that are all smaller count as zeros."""
MOST_PARTS = 4
"""``MAX_PARTS`` of groups.h: weights of a joined layer."""
_CODINGS = {"int": 0, "e4m3": 1, "table": 2}
"""``enum coding`` of groups.h."""
_CHUNK = 1 << 22
"""Elements of a weight that are dequantized at a time."""
_packed: WeakKeyDictionary[QuantizedWeight, Panels] = WeakKeyDictionary()
"""Panels of weights that are still in use, so that tied layers share them."""

Part = QuantizedWeight | Panels


def pack(weight: Part) -> Part:
    """Return the panels of ``weight`` if the kernels can use them, else the weight itself. Layers of one weight share
    its panels."""
    if cpu.library() is None or (isinstance(weight, QuantizedWeight) and weight.codes.device.type != "cpu"):
        return weight.weight() if isinstance(weight, Panels) else weight
    if isinstance(weight, Panels):
        return weight
    if (found := _packed.get(weight)) is None:
        found = _packed[weight] = Panels.of(weight)
    return found


def unpack(part: Part) -> QuantizedWeight:
    """Return the weight of ``part``; a copy if it is packed."""
    return part.weight() if isinstance(part, Panels) else part


class CompactLinear(nn.Module):
    """``x @ weight.T + bias``: ``x`` [..., in_features] to [..., out_features], in ``dtype``.

    With an ``activation`` the weight [2n, in] has a gate's rows before those of the values, and the result has n
    columns: ``activation(gate) * values``. ``parts``: the weights whose rows follow each other, of any formats; with an
    activation, the gate and the values. Only products with codes that are integers can be rounded: others are exact.
    ``terms``: in an integer product with each part, the 8-bit numbers whose sum an activation is rounded to, 1 or 2.
    """

    def __init__(
        self, weight: Part, bias: torch.Tensor | None, dtype: torch.dtype, *, exact: bool,
        activation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        parts = [weight] if activation is None else _halves(weight)
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else list(bias.split(sizes))
        self._set(parts, biases, dtype, exact, activation, [1] * len(parts))

    @classmethod
    def joined(
        cls, weights: Sequence[Part], biases: Sequence[torch.Tensor | None], dtype: torch.dtype, *,
        exact: bool, activation: str | None = None, terms: Sequence[int] = (),
    ) -> CompactLinear:  # fmt: skip
        """Return the layer of all rows of ``weights`` (at most :data:`MOST_PARTS`; with an activation, the gate and the
        values), one after the other. A missing bias is 0, missing ``terms`` are 1."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set(weights, biases, dtype, exact, activation, terms or [1] * len(weights))
        return layer

    def changed(self, *, exact: bool = False, terms: int = 1) -> CompactLinear:
        """Return the same layer with other products; it shares the weights."""
        every = [terms] * len(self.parts)
        return CompactLinear.joined(
            self.parts, self.biases, self.weight.dtype, exact=exact, activation=self.activation, terms=every
        )

    def _set(
        self, weights: Sequence[Part], biases: Sequence[torch.Tensor | None], dtype: torch.dtype, exact: bool,
        activation: str | None, terms: Sequence[int],
    ) -> None:  # fmt: skip
        parts, rows = [pack(weight) for weight in weights], [weight.shape[0] for weight in weights]
        if len(parts) > MOST_PARTS or (activation and (len(parts) != 2 or rows[0] != rows[1])):
            raise ValueError(f"{len(parts)} weights of {rows} rows cannot be joined")
        self.exact, self.activation, self.parts, self.terms = exact, activation, parts, list(terms)
        self.biases = [None if each is None else each.detach().to(dtype).clone() for each in biases]
        self.in_features = parts[0].shape[1]
        self.out_features = rows[0] if activation else sum(rows)
        # modelling code may read the dtype or the shape, never the values
        self.weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")
        self._library, self._kept = cpu.library(), list[object]()
        self._type = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.address = 0
        """The address of ``struct linear``; 0 if torch computes this layer."""
        if self._library is not None and all(isinstance(part, Panels) for part in parts):
            self.address = self._describe()

    def _describe(self) -> int:
        """Make the C structures, and return the address of ``struct linear``."""
        after: cpu.Groups | None = None
        for part, bias, terms in reversed(list(zip(self.parts, self.biases, self.terms, strict=True))):
            assert isinstance(part, Panels)
            padded = None
            if bias is not None:
                padded = torch.zeros(-(-part.shape[0] // PANEL) * PANEL)
                padded[: part.shape[0]] = bias.float()
            after = described(part, self.exact, padded, after, terms)
            self._kept += [after, padded]
        assert after is not None
        code = linears.ACTIVATIONS[self.activation] if self.activation else 0
        linear = cpu.Linear(
            None, None, self.in_features, self.out_features, self.out_features, cpu.TYPES[self._type], code, 0,
            ctypes.addressof(after),
        )  # fmt: skip
        self._kept.append(linear)
        return ctypes.addressof(linear)

    @property
    def bias(self) -> torch.Tensor | None:
        """The biases of all parts, one after the other."""
        if all(each is None for each in self.biases):
            return None
        some = next(each for each in self.biases if each is not None)
        return torch.cat([
            some.new_zeros(part.shape[0]) if each is None else each
            for part, each in zip(self.parts, self.biases, strict=True)
        ])  # fmt: skip

    @property
    def quantized(self) -> QuantizedWeight | None:
        """The weight, None if it is joined from several; a copy if it is packed."""
        return unpack(self.parts[0]) if len(self.parts) == 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def integer_formats(self) -> set[str]:
        """The formats of the weights for which it rounds activations."""
        if self.exact:
            return set()
        codings = ((part.stated["coding"] if isinstance(part, Panels) else part.coding) for part in self.parts)
        return {part.source for part, coding in zip(self.parts, codings, strict=True) if coding == "int"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` [rows, in_features]; return [rows, out_features]."""
        if not self.address:
            return self._in_torch(x)
        x = x.to("cpu", self._type)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        self._multiply(x, out.data_ptr(), None)
        return out.to(self.weight.dtype)

    def add_to(self, to: torch.Tensor, x: torch.Tensor) -> None:
        """Add the result for ``x`` [rows, in_features] in place to ``to`` [rows, out_features], which is contiguous."""
        if not self.address or to.dtype != self._type or x.dtype != self._type or x.stride(1) != 1:
            to += self.rows(x)
            return
        self._multiply(x, to.data_ptr(), to.data_ptr())

    def _multiply(self, x: torch.Tensor, to: int, add: int | None) -> None:
        assert self._library is not None
        if self._library.linear(
            self.address, x.data_ptr(), to, add, x.shape[0], x.stride(0), self.out_features, torch.get_num_threads()
        ):
            raise MemoryError("no memory for a linear layer")

    def _in_torch(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.weight.dtype
        parts = zip(self.parts, self.terms, strict=True)
        out = torch.cat([_product(unpack(part), x.to(dtype), self.exact, terms) for part, terms in parts], 1)
        if (bias := self.bias) is not None:
            out = out + bias
        if self.activation:
            gate, values = out.chunk(2, dim=1)
            out = ACTIVATIONS[self.activation](gate) * values
        return out.to(dtype)

    def extra_repr(self) -> str:
        formats = ", ".join(dict.fromkeys(part.source or f"{part.bits} bits" for part in self.parts))
        bits = ", ".join(dict.fromkeys(f"{8 * terms} bits" for terms in self.terms))
        return f"{self.in_features}, {self.out_features}, {formats}, {'exact' if self.exact else f'integer ({bits})'}"


def _halves(weight: Part) -> list[Part]:
    half = weight.shape[0] // 2
    if isinstance(weight, Panels):
        return [weight.rows(0, half), weight.rows(half, 2 * half)]
    return [weight.rows(slice(0, half)), weight.rows(slice(half, 2 * half))]


def described(
    part: Panels, exact: bool, bias: torch.Tensor | None = None, after: cpu.Groups | None = None, terms: int = 1
) -> cpu.Groups:
    """Return ``struct groups`` of ``part``, which points into its tensors, ``bias`` and the struct of the part
    ``after`` it."""
    tensors, stated = part.tensors, part.stated
    exact = exact or stated["coding"] != "int"

    def pointer(name: str) -> int | None:
        return tensors[name].data_ptr() if name in tensors else None

    names = ("codes", "scales", "minima", "sub_scales", "sub_minima", "zeros")
    return cpu.Groups(
        *map(pointer, names), None if bias is None else bias.data_ptr(), pointer("table"), pointer("order"),
        None if after is None else ctypes.addressof(after), part.shape[1], part.padded, part.shape[0],
        stated["bits"], _CODINGS[stated["coding"]], stated["group"], stated["span"], stated["zero"], stated["most"],
        cpu.TYPES[tensors["scales"].dtype], exact, 1 if exact else terms,
    )  # fmt: skip


def _product(weight: QuantizedWeight, x: torch.Tensor, exact: bool, terms: int) -> torch.Tensor:
    """Return ``x @ weight.T``, in the type of ``x`` if ``exact``, else in float32."""
    if not exact and weight.coding == "int":
        x = round_activations(x, weight, terms)
    elif _has_triton(x.device.type):
        from common.kernels.triton.groups import multiply

        return multiply(x.contiguous(), weight)
    step = max(1, _CHUNK // weight.shape[1])
    out = x.new_empty(x.shape[0], weight.shape[0])
    for at in range(0, weight.shape[0], step):
        some = weight.rows(slice(at, at + step)).dequantize(x.dtype)
        out[:, at : at + step] = functional.linear(x, some)
    return out


@cache
def _has_triton(device: str) -> bool:
    """Return whether exact products run in Triton's kernels on a device of this type."""
    return triton.unusable(device) is None


def round_activations(x: torch.Tensor, weight: QuantizedWeight, terms: int = 1) -> torch.Tensor:
    """Return ``x`` [rows, in] rounded to 8 bits for an integer product with ``weight``, in float32: the largest
    magnitude of a row's group becomes 127. A group has as many columns as one of the weight, but at least 32. With two
    ``terms``, what is left is rounded to multiples of a :data:`TERM_RATIO`-th of that step and added."""
    columns, size = x.shape[1], max(SMALLEST_GROUP, weight.group)
    order = None if weight.order is None else weight.order.long()
    values = functional.pad(x.float(), (0, -columns % weight.group))
    width = values.shape[1]
    if order is not None:
        values = values[:, order]
    groups = functional.pad(values, (0, -width % size)).unflatten(1, (-1, size))
    most = groups.abs().amax(2, keepdim=True)
    groups = groups * torch.where(most < SMALLEST_INPUT, 0.0, most.new_tensor(127) / most)  # 127 / most is not exact
    codes = groups.round().clamp_(-127, 127)
    if terms > 1:
        codes += ((groups - codes) * TERM_RATIO).round_() / TERM_RATIO
    rounded = (codes * (most / 127)).view(x.shape[0], groups.shape[1] * size)[:, :width]
    if order is not None:
        rounded = torch.empty_like(rounded).index_copy_(1, order, rounded)
    return rounded[:, :columns]


def integer_formats(model: nn.Module) -> frozenset[str]:
    """Return the formats of the weights in ``model`` with which products round activations."""
    layers = (module for module in model.modules() if isinstance(module, CompactLinear))
    return frozenset().union(*(layer.integer_formats for layer in layers))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all linear layers' weights as stored, without oneDNN's padding."""
    count = 0
    for module in model.modules():
        if isinstance(module, CompactLinear):
            count += module.nbytes
        elif isinstance(module, linears.NativeLinear):
            count += module.packed.nbytes
        elif isinstance(module, linears.PackedLinear | nn.Linear):
            count += module.weight.nbytes
    return count


class CompactEmbedding(nn.Module):
    """Rows of a quantized ``weight`` [tokens, width], dequantized on look-up: ids [...] to [..., width]."""

    def __init__(self, weight: Part, dtype: torch.dtype) -> None:
        super().__init__()
        self.part = pack(weight)
        self.num_embeddings, self.embedding_dim = weight.shape
        # modelling code may read the dtype or the shape, never the values
        self.weight = torch.empty(weight.shape, dtype=dtype, device="meta")
        self._library, self._groups = cpu.library(), None
        if isinstance(self.part, Panels):
            self._groups = described(self.part, exact=True)

    @property
    def address(self) -> int:
        """The address of ``struct groups``; 0 if torch looks rows up."""
        return 0 if self._groups is None else ctypes.addressof(self._groups)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids``. Raises IndexError for an id outside the vocabulary."""
        dtype, flat = self.weight.dtype, ids.reshape(-1).long()
        if isinstance(self.part, QuantizedWeight):
            rows = self.part.rows(flat).dequantize(dtype)
        else:
            assert self._library is not None
            rows = torch.empty(flat.shape[0], self.embedding_dim, dtype=dtype)
            flat = flat.cpu().contiguous()
            if self._library.group_rows(
                self.address, flat.data_ptr(), flat.shape[0], rows.data_ptr(), self.embedding_dim, cpu.TYPES[dtype]
            ):
                raise IndexError(f"a token outside the vocabulary of {self.num_embeddings}")
        return rows.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.part.source or self.part.bits}"
