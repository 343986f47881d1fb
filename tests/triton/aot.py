"""Compile the kernels as they are launched, for GPUs that are not here: ``python -m tests.triton.aot [--sample]``.

The host functions run on tensors without memory, and their launches are recorded; each is then compiled for sm_80,
sm_90 and sm_100, with KV in fp8 for sm_89 in place of sm_80. Nothing may spill (a stack of 0 bytes), shared memory must
be within 227 KiB, prefill in 16 bits must use Hopper's matrix instructions, and numbers must saturate when they become
float8. Must not run with TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from common.kernels.e4m3 import E4M3
from common.kernels.triton import INTERPRETED, decode, groups, layers, pieces, prefill, rotary, store
from common.kernels.triton.spans import DecodeRows, PrefillSpans
from common.quantization.weight import QuantizedWeight
from tests.triton.groups import FORMATS, weight_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SHARED_LIMIT = 227 << 10
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    E4M3: "*fp8e4nv", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
SATURATING = "cvt.rn.satfinite.e4m3x2.f32"
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Model(NamedTuple):
    """The attention of one layer, as the kernels get it."""

    name: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    stores_fp8: bool = False
    scaling: float = 0.1

    @property
    def sinks(self) -> torch.Tensor | None:
        return empty(self.heads, dtype=self.dtype) if self.has_sinks else None

    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of one layer of a pool with 32 layers and more than 2**31 elements."""
        parts = []
        for dim in (self.k_dim, self.v_dim):
            row = self.kv_heads * dim
            block = 64 * self.size * row
            whole = empty(-(-(1 << 33) // block), block, dtype=E4M3 if self.stores_fp8 else self.dtype)
            parts.append(whole[:, : self.size * row].unflatten(1, (self.size, self.kv_heads, dim)))
        return parts[0], parts[1]

    @property
    def capabilities(self) -> tuple[int, ...]:
        """What it is compiled for. For Ada, Triton 3.6 and 3.7 round to float8 by way of float16, and so twice."""
        if not self.stores_fp8:
            return (80, 90, 100)
        return (90, 100) if triton.__version__.startswith(("3.6.", "3.7.")) else (89, 90, 100)


MODELS = (
    Model("8B", BFLOAT16, 32, 8, 128, 128),
    Model("8B, float16", FLOAT16, 32, 8, 128, 128, size=64),
    Model("8B, float32", FLOAT32, 32, 8, 128, 128),
    Model("Gemma 2", BFLOAT16, 16, 8, 256, 256, window=4096, softcap=50.0),
    Model("gpt-oss", BFLOAT16, 64, 8, 64, 64, window=128, has_sinks=True),
    Model("DeepSeek", BFLOAT16, 128, 128, 192, 128),
    Model("one KV head", BFLOAT16, 71, 1, 64, 64, size=256),
    Model("odd heads", BFLOAT16, 20, 4, 80, 96),
    Model("8B, fp8 KV", BFLOAT16, 32, 8, 128, 128, stores_fp8=True),
    Model("float16, fp8 KV", FLOAT16, 32, 8, 128, 128, size=64, stores_fp8=True),
    Model("float32, fp8 KV", FLOAT32, 32, 8, 128, 128, stores_fp8=True),
    Model("Gemma 2, fp8 KV", BFLOAT16, 16, 8, 256, 256, window=4096, softcap=50.0, stores_fp8=True),
    Model("gpt-oss, fp8 KV", BFLOAT16, 64, 8, 64, 64, window=128, has_sinks=True, stores_fp8=True),
    Model("DeepSeek, fp8 KV", BFLOAT16, 128, 128, 192, 128, stores_fp8=True),
    Model("one KV head, fp8 KV", BFLOAT16, 71, 1, 64, 64, size=256, stores_fp8=True),
    Model("odd heads, fp8 KV", BFLOAT16, 20, 4, 80, 96, stores_fp8=True),
)
FEW = ("8B", "8B, fp8 KV")
"""Models of the sample."""
FEW_FORMATS = ("Q4_K", "GPTQ", "MXFP4")
"""Formats of weights of all models but the first, and of the sample."""


class Launch(NamedTuple):
    """One recorded launch: the kernel, its arguments by name, and how it is to be compiled."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Compiled(NamedTuple):
    """What the compiler made of one launch."""

    stack: int
    registers: int
    shared: int
    has_hgmma: bool
    saturates: bool


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def recorded(module: Any, launches: list[Launch]) -> Iterator[None]:
    """Record the launches of the kernels of ``module`` in place of running them."""

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def record(*arguments: Any, **named: Any) -> None:
                options = {key: named.pop(key) for key in OPTIONS if key in named}
                names = [name for name in self.kernel.arg_names if name not in named]
                launches.append(Launch(self.kernel, dict(zip(names, arguments, strict=True)) | named, options))

            return record

    kernels = {name: each for name, each in vars(module).items() if isinstance(each, triton.JITFunction)}
    for name, kernel in kernels.items():
        setattr(module, name, Recorder(kernel))
    try:
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def launches_of(model: Model, capability: int, formats: Iterable[str] = FEW_FORMATS) -> list[Launch]:
    """Return the launches of one layer: decode of few rows and of many, prefill, writes and transfers, and products
    with weights of ``formats``; with KV in fp8 only those that look at its type."""
    made: list[Launch] = []
    prefill.capability_of = lambda device: capability // 10  # type: ignore[assignment]
    keys, values = model.pool()
    rows = 256
    query = empty(rows, model.heads, model.k_dim, dtype=model.dtype)
    out = empty(rows, model.heads, model.v_dim, dtype=model.dtype)
    ints = empty(rows, dtype=torch.int32)
    scales = (empty(model.kv_heads, 1, dtype=FLOAT32),) * 2 if model.stores_fp8 else None
    with recorded(decode, made):
        part = DecodeRows(ints, ints, empty(512, rows, dtype=torch.int32))
        scratch = (empty(1 << 20, dtype=FLOAT32), empty(1 << 16, dtype=FLOAT32))
        for splits in (8, 1):
            decode.attend_decode(query, keys, values, out, part, splits, scratch, model, scales)
    with recorded(prefill, made):
        for longest in (8, rows):
            spans = PrefillSpans(ints, ints, ints, part.tables, rows, longest)
            prefill.attend_prefill(query, keys, values, out, spans, model, scales)
    with recorded(store, made):
        slots = (empty(rows, dtype=torch.int64), empty(rows, dtype=torch.int64))
        key = empty(rows, model.kv_heads, model.k_dim, dtype=model.dtype)
        value = empty(rows, model.kv_heads, model.v_dim, dtype=model.dtype)
        store.write(key, value, keys, values, slots, scales)
    with recorded(rotary, made):
        angles = (empty(rows, model.k_dim, dtype=model.dtype),) * 2
        head = empty(model.k_dim, dtype=model.dtype)
        for norms in (None, (head, head, 1e-6)):
            rotary.rotate_write(query, key, value, angles, norms, keys, values, slots, scales)
    if model.stores_fp8:
        return made
    with recorded(layers, made):
        hidden, wide = empty(rows, 4096, dtype=model.dtype), empty(rows, 28672, dtype=model.dtype)
        weight = empty(4096, dtype=model.dtype)
        for delta in (None, hidden):
            layers.add_norm(hidden, delta, weight, 1e-6)
        for activation in layers.ACTIVATIONS:
            layers.gate(*wide.chunk(2, dim=1), activation)
    with recorded(groups, made):
        for name in formats:
            for count in (1, rows):
                groups.multiply(hidden[:count], quantized(name), weight if name == "GPTQ" else None)
    with recorded(pieces, made):
        pieces.copy(empty(3, 37, dtype=torch.int64), 1 << 20)
    return made


@cache
def quantized(name: str) -> QuantizedWeight:
    """Return a weight [4096, 4096] of a format, without memory."""
    return weight_of(FORMATS[name], 4096, 4096, "meta")


def compiled(launch: Launch, capability: int) -> Compiled:
    """Compile one launch, with arguments specialised as by the launcher: ones are constants, and multiples of 16 are
    known to be."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    multiples: dict[tuple[int, ...], Any] = {}
    is_constant = {each.name: each.is_constexpr for each in launch.kernel.params}
    for index, name in enumerate(launch.kernel.arg_names):
        given = launch.arguments[name]
        if is_constant[name] or (isinstance(given, int) and given == 1):
            signature[name], constants[name] = "constexpr", given
        elif isinstance(given, torch.Tensor):
            signature[name], multiples[index,] = POINTERS[given.dtype], [["tt.divisibility", 16]]
        elif isinstance(given, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(1 << 31) <= given < 1 << 31 else "i64"
            if given % 16 == 0:
                multiples[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=multiples)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _said_by("cuobjdump", "-res-usage", file.name)
        tensor_cores = capability == 90 and launch.kernel.__name__ == "prefill"
        code = _said_by("nvdisasm", file.name) if tensor_cores else ""
    stack, registers = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("STACK", "REG"))  # type: ignore[index]
    return Compiled(stack, registers, made.metadata.shared, "HGMMA" in code, SATURATING in made.asm["ptx"])


def _said_by(tool: str, *words: str) -> str:
    return subprocess.run([TOOLS / tool, *words], capture_output=True, text=True, check=True).stdout


def faults(model: Model, launch: Launch, capability: int, found: Compiled) -> Iterator[str]:
    if found.stack:
        yield f"spills: its stack has {found.stack} bytes"
    if found.shared > SHARED_LIMIT:
        yield f"needs {found.shared} bytes of shared memory"
    if capability == 90 and launch.kernel.__name__ == "prefill" and model.dtype != FLOAT32 and not found.has_hgmma:
        yield "uses no HGMMA"
    if model.stores_fp8 and launch.kernel.__name__ in ("write_kv", "rotate_and_write") and not found.saturates:
        yield "does not saturate"


def is_sampled(model: Model, launch: Launch, capability: int) -> bool:
    """Return whether the sample has this launch: all for sm_90, else attention only, and that not for KV in fp8."""
    if model.stores_fp8:
        return capability == 90
    return launch.kernel.__name__ in ("decode_split", "prefill") or capability == 90


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--models", nargs="*", default=[])
    options = parser.parse_args()
    assert not INTERPRETED, "interpreted kernels cannot be compiled"
    print(f"triton {triton.__version__}")
    count = wrong = 0
    for model in MODELS:
        if model.name not in (options.models or (FEW if options.sample else [each.name for each in MODELS])):
            continue
        for capability in model.capabilities:
            formats = FORMATS if model is MODELS[0] and capability == 90 and not options.sample else FEW_FORMATS
            launches = launches_of(model, capability, formats)
            unlike = {f"{each.kernel.__name__} {each.arguments}": each for each in launches}
            for launch in unlike.values():
                if options.sample and not is_sampled(model, launch, capability):
                    continue
                found = compiled(launch, capability)
                bad = list(faults(model, launch, capability, found))
                print(f"{model.name:19} {launch.kernel.__name__:17} sm_{capability}", *found, *bad, flush=True)
                count, wrong = count + 1, wrong + bool(bad)
    print(f"{count} kernels compiled, {wrong} wrong")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
