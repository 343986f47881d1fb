"""Linear layers with weights packed for the processor, which replace those of a loaded model.

Packing once saves a reorder (or an unpacked product) in every step. There are two formats: that of our own kernels
(:mod:`common.kernels.cpu`) where they are faster, and oneDNN's elsewhere. The packed weight replaces the plain one.
Only a weight that is tied to an embedding exists twice, because rows cannot be looked up in the packed form.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from common.kernels import cpu
from common.platform import device, memory

ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}
"""Activations that a gated linear layer can apply: names in transformers, and values of ``enum activation`` in
native.c."""
_CACHE_LINE = 64
_READ = "tandem_weight_is_read"
"""Attribute of linear layers whose weight another module reads."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` by oneDNN, with ``weight`` [out, in] reordered for about ``rows`` rows per call: ``x``
    [..., in_features] to [..., out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        self.bias = None if bias is None else bias.detach()
        # modelling code may read the dtype or the shape, never the values: see marking_read_weights
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, packed"


class NativeLinear(nn.Module):
    """``x @ weight.T + bias`` by our own kernel, for float32 and bfloat16: ``x`` [..., in_features] to
    [..., out_features].

    With an ``activation`` the weight [2n, in] stacks a gate's rows on those of the values, and the result has n
    columns: ``activation(gate) * values``. Float32 weights that bfloat16 represents exactly, as in most checkpoints,
    are stored as bfloat16, in half of the bytes. Both kinds are multiplied in AMX tiles where the processor has them, a
    row of float32 as the sum of three of bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        library = cpu.library()
        assert library is not None
        self._library, lanes = library, library.lanes()
        columns, self.in_features = weight.shape
        self.out_features = columns // 2 if activation else columns
        if activation:  # the kernel expects vectors of the gate and of the values in alternation
            order = torch.arange(columns).view(2, -1, lanes).transpose(0, 1).flatten()
            weight, bias = weight[order], None if bias is None else bias[order]
        padded = -(-columns // lanes) * lanes
        kind, halves = cpu.TYPES[weight.dtype], False
        self.bias = None if bias is None else _padded(bias, padded)
        whole = weight.detach().contiguous()
        if whole.dtype == torch.float32 and torch.equal(half := whole.bfloat16(), whole):
            whole, halves = half, True
        self.packed = _room(whole, padded)
        library.pack(whole.data_ptr(), columns, self.in_features, kind, halves, self.packed.data_ptr())
        self._linear = cpu.Linear(
            self.packed.data_ptr(), _pointer(self.bias), self.in_features, padded,
            self.out_features, kind, ACTIVATIONS[activation] if activation else 0, halves,
        )  # fmt: skip
        self.address = ctypes.addressof(self._linear)
        self.weight = torch.empty(self.out_features, self.in_features, dtype=weight.dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return self.rows(rows).view(*x.shape[:-1], self.out_features)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` [rows, in_features]; return [rows, out_features] in its dtype, which is the weight's."""
        x = _plain(x)
        out = x.new_empty(x.shape[0], self.out_features)
        self._multiply(x, out.data_ptr(), None)
        return out

    def add_to(self, to: torch.Tensor, x: torch.Tensor) -> None:
        """Add the result for ``x`` [rows, in_features] in place to ``to`` [rows, out_features], which is contiguous."""
        x = _plain(x)
        self._multiply(x, to.data_ptr(), to.data_ptr())

    def _multiply(self, x: torch.Tensor, to: int, add: int | None) -> None:
        if self._library.linear(
            self.address, x.data_ptr(), to, add, x.shape[0], x.stride(0), self.out_features, torch.get_num_threads()
        ):
            raise MemoryError("no memory for a linear layer")

    def move(self, room: torch.Tensor) -> None:
        """Move the packed weight into ``room``, a uint8 tensor of its size in bytes, and use it from there."""
        self.packed = room.view(self.packed.dtype).copy_(self.packed)
        self._linear.packed = self.packed.data_ptr()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, native"


def gather(linears: Sequence[NativeLinear]) -> None:
    """Move packed weights next to each other, into large pages; nothing is moved if they do not fill one."""
    sizes = [-(-linear.packed.nbytes // _CACHE_LINE) * _CACHE_LINE for linear in linears]
    if sum(sizes) < memory.LARGE_PAGE:
        return
    pages, start = memory.large_pages(sum(sizes))
    for linear, size in zip(linears, sizes, strict=True):
        linear.move(torch.frombuffer(pages, dtype=torch.uint8, count=linear.packed.nbytes, offset=start))
        start += size


def _room(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Return uninitialized memory for ``weight`` [out, in] packed with its ``out`` padded to ``columns``."""
    return torch.empty(columns * weight.shape[1], dtype=weight.dtype)


def _padded(column: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``column`` as float32, padded with zeros to ``length``."""
    out = torch.zeros(length)
    out[: column.shape[0]] = column.detach().float()
    return out


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows that begin at whole 32-bit words, as the kernel needs; a copy if necessary."""
    return x.contiguous() if x.stride(1) != 1 or x.stride(0) % 2 else x


def native_pays(dtype: torch.dtype) -> bool:
    """Return whether our own linear layers of ``dtype`` are faster on this processor than oneDNN's.

    For float32 they are with AVX2 or AVX-512. For bfloat16 they need bfloat16 instructions, and must use AMX tiles
    where the processor has them.
    """
    library = cpu.library()
    if library is None or dtype == torch.float16:
        return False
    if dtype == torch.bfloat16:
        fastest = library.variants[0]
        return fastest == "amx_bf16" or (fastest.startswith("avx512_bf16") and "amx_bf16" not in device.cpu_flags())
    return dtype == torch.float32 and "avx2" in library.variants


def packing_pays(dtype: torch.dtype, rows: int) -> bool:
    """Return whether oneDNN's packed layers of ``dtype`` are faster here than plain ones, for ``rows`` rows per call; a
    single float32 row is faster with the plain weight."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32 and rows > 1


def pack_linears(model: nn.Module, rows: int) -> int:
    """Replace every plain linear layer that is faster packed; return their number. Layers are replaced one by one, and
    each plain weight is freed at once, to keep the peak of memory low."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = linear_weight(child)
            if weight is not None and (packed := _packed(weight, child.bias, rows)) is not None:  # type: ignore[arg-type]
                setattr(parent, name, packed)
                del weight, child
                count += 1
    return count


def _packed(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> nn.Module | None:
    if weight.device.type != "cpu":
        return None
    if native_pays(weight.dtype) and weight.shape[1] % 2 == 0:
        linear = NativeLinear(weight, bias)
        gather([linear])
        return linear
    return PackedLinear(weight, bias, rows) if packing_pays(weight.dtype, rows) else None


@contextlib.contextmanager
def marking_read_weights(model: nn.Module) -> Iterator[None]:
    """Mark, after runs of ``model``, the linear layers that were not called although the module that has them was: it
    reads their weight itself, so they must stay plain."""
    called = set[nn.Module]()
    linears = [(parent, child) for parent in model.modules() for child in parent.children() if type(child) is nn.Linear]
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module))
        for module in {module: None for pair in linears for module in pair}
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for parent, child in linears:
        if parent in called and child not in called:
            child.__dict__[_READ] = True


def linear_weight(module: nn.Module) -> torch.Tensor | None:
    """Return the [out, in] weight of a plain linear layer; None for any other module, even a subclass, which may behave
    differently, and for one whose weight is read by another module."""
    if _READ in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return module.weight
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return module.weight.t()  # type: ignore[operator]
    return None
