"""``tandem bench roofline``: what this machine can do at best, to show beside every other figure.

Measures read bandwidth by size, matrix products of a model's shapes, copies within a process and out of shared memory,
a raw loopback socket, and links: KV handed from process to process (:mod:`bench.micro.wire`), beside the copy or the
socket that it needs. Every timed byte is random and really read. A limit is the best of several rounds: what the
machine gives when nothing else uses it.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

from bench.load import neighbours, results
from bench.micro import wire
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.config.bench.roofline import BenchRooflineConfig
from common.core.errors import StartError
from common.kernels import cpu
from common.model.compact import CompactLinear
from common.model.linears import NativeLinear, PackedLinear, gather, native_pays, packing_pays
from common.platform import device
from common.quantization.weight import quantize

MIB = 1 << 20
READ_MIB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROWS = (1, 4, 16, 64, 512, 1024)
HALVES = "native, bfloat16 kept"
"""Name of a way to compute float32 linear layers: bfloat16 weights of a checkpoint are kept as bfloat16."""
LINKS = (("shared memory", "shm", "shared memory"), ("ZeroMQ over TCP", "zmq", "loopback socket"))
"""By name: the ``--kv-transport``, and the copy that limits it."""
LINK_TOKENS = 1024
"""Tokens of a transfer, 128 KiB of KV each."""
_COPY_BYTES, _SOCKET_BYTES = 256 * MIB, 512 * MIB
_SQUARE = 2048
_LEAST_S = 0.02
"""A round repeats the work for at least this long, so that the clock's resolution does not matter."""


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of a model: ``count`` times [rows, ``inputs``] to [rows, ``outputs``]."""

    name: str
    outputs: int
    inputs: int
    count: int

    @property
    def terms(self) -> int:
        """8-bit numbers that an activation is rounded to in an integer product, as
        :func:`common.model.round_linears.refine` has it."""
        return 1 if self.name in ("out", "gate_up") else 2


LLAMA_82M: Mapping[str, int] = {
    "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8192,
}  # fmt: skip
"""Shape of the model for which the goals on two cores are stated."""


def shapes(config: Mapping[str, Any]) -> list[LinearShape]:
    """Return the merged linear layers of the decoder that a ``config.json`` describes."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    dim = config.get("head_dim") or hidden // heads
    kv_heads, inner = config.get("num_key_value_heads") or heads, config["intermediate_size"]
    return [
        LinearShape("qkv", (heads + 2 * kv_heads) * dim, hidden, layers),
        LinearShape("out", hidden, heads * dim, layers),
        LinearShape("gate_up", 2 * inner, hidden, layers),
        LinearShape("down", hidden, inner, layers),
        LinearShape("lm_head", config["vocab_size"], hidden, 1),
    ]


def best_s(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the seconds of one ``work()``, in the fastest of ``rounds`` rounds of at least ``_LEAST_S`` each."""
    work()
    started = time.perf_counter()
    work()
    repeats = max(1, int(_LEAST_S / max(time.perf_counter() - started, 1e-9)))
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def random_words(count_bytes: int) -> torch.Tensor:
    """Return ``count_bytes`` random bytes as int64 words, already touched."""
    return torch.from_numpy(np.random.default_rng(0).integers(-(2**62), 2**62, count_bytes // 8))


# -- memory -----------------------------------------------------------------------------------------------------------


def reads(sizes: Sequence[int]) -> dict[int, Callable[[], object]]:
    """Return, by size in MiB, a function that reads so much memory with all threads together."""
    words, library, threads = random_words(max(sizes) * MIB), cpu.library(), torch.get_num_threads()

    def read(part: torch.Tensor) -> Callable[[], object]:
        if library is None:
            return part.sum
        return lambda: library.read(part.data_ptr(), part.numel(), threads)

    return {mib: read(words[: mib * MIB // 8]) for mib in sizes}


def read_rates(sizes: Sequence[int] = ()) -> dict[int, float]:
    """Measure the bytes per second of reading, by size in MiB (default ``READ_MIB``)."""
    return {mib: mib * MIB / best_s(read) for mib, read in reads(sizes or READ_MIB).items()}


def rate_of(rates: Mapping[int, float], size_bytes: float) -> float:
    """Return the read rate of the smallest measured size that holds ``size_bytes``."""
    return rates[min((mib for mib in rates if mib * MIB >= size_bytes), default=max(rates))]


def copy_rate() -> float:
    """Measure the bytes per second of a copy within the process. Each byte is read and written once, and counted
    once."""
    source = random_words(_COPY_BYTES)
    target = source.clone()
    return _COPY_BYTES / best_s(lambda: target.copy_(source))


def shared_copy_rate() -> float:
    """Measure the bytes per second of a copy out of shared memory, from a second, read-only mapping."""
    descriptor = os.memfd_create("roofline", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _COPY_BYTES)
        with (
            mmap.mmap(descriptor, _COPY_BYTES) as written,
            mmap.mmap(descriptor, _COPY_BYTES, prot=mmap.PROT_READ) as seen,
        ):
            return _mapped_copy_rate(written, seen)
    finally:
        os.close(descriptor)


def _mapped_copy_rate(written: mmap.mmap, seen: mmap.mmap) -> float:
    np.frombuffer(written, np.int64)[:] = random_words(_COPY_BYTES).numpy()
    source = np.frombuffer(seen, np.int64)
    target = np.array(source)
    return _COPY_BYTES / best_s(lambda: np.copyto(target, source))


def socket_rate() -> float:
    """Measure the bytes per second of a TCP connection on loopback; sender and receiver have a thread each."""
    data = memoryview(random_words(4 * MIB).numpy().tobytes())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:

            def send() -> None:
                for _ in range(_SOCKET_BYTES // len(data)):
                    sender.sendall(data)

            def once() -> None:
                thread = threading.Thread(target=send)
                thread.start()
                buffer, left = bytearray(len(data)), _SOCKET_BYTES
                while left:
                    left -= receiver.recv_into(buffer, min(left, len(buffer)))
                thread.join()

            return _SOCKET_BYTES / best_s(once, 3)


# -- matrix products --------------------------------------------------------------------------------------------------


Layer = Callable[[torch.Tensor], torch.Tensor]
INT8_GROUP = 64
"""Columns of a group of int8 weights, as with ``--quantization int8``."""


def ways(dtype: torch.dtype, rows: int, int8: bool = False) -> dict[str, Callable[[torch.Tensor], Layer]]:
    """Return how a linear layer can be computed here: by name, a function that turns a weight into a function of rows.
    ``int8``: the weight is quantized, in groups of :data:`INT8_GROUP` columns with a scale of 16 bits."""
    if int8:
        return {
            "torch": _dequantized_each_time,
            "native": lambda weight: CompactLinear(quantize(weight, 8, INT8_GROUP), None, dtype, exact=False),
        }
    found: dict[str, Callable[[torch.Tensor], Layer]] = {"torch": lambda weight: lambda x: functional.linear(x, weight)}
    if packing_pays(dtype, rows):
        found["onednn"] = lambda weight: PackedLinear(weight, None, rows)
    if native_pays(dtype):
        found["native"] = lambda weight: NativeLinear(weight, None)
        if dtype == torch.float32:
            found[HALVES] = lambda weight: NativeLinear(weight.bfloat16().float(), None)
    return found


def _dequantized_each_time(weight: torch.Tensor) -> Layer:
    rounded = quantize(weight, 8, INT8_GROUP)
    return lambda x: functional.linear(x, rounded.dequantize(x.dtype))


def weight_bytes(way: str, dtype: torch.dtype, int8: bool = False) -> float:
    """Return the bytes of one weight element if computed in that way with ``dtype``."""
    if int8:
        return 1 + 2 / INT8_GROUP
    return 2 if way == HALVES else dtype.itemsize


@dataclass(frozen=True)
class Product:
    """The model's linear layers for ``rows`` rows, each as often as the model has it: the fastest way, and the seconds
    of all."""

    dtype: str
    rows: int
    flops_per_s: float
    bytes_per_s: float
    """Bytes of the weights per second, in the number format of that way."""
    way: str
    seconds: dict[str, float]
    int8: bool = False

    def rates(self, way: str) -> tuple[float, float]:
        """Return the operations and the bytes of weights per second of the given ``way``."""
        flops_per_s = self.flops_per_s * self.seconds[self.way] / self.seconds[way]
        return flops_per_s, flops_per_s / (2 * self.rows) * weight_bytes(way, getattr(torch, self.dtype), self.int8)


def passes(
    layers: list[LinearShape], dtype: torch.dtype, rows: int, int8: bool = False
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each way's name and a pass of ``rows`` rows through all layers, one after another, so that weights come
    from where a step finds them (ours are in large pages). The weights of a way are made when it is requested."""
    inputs = {shape.inputs: torch.randn(rows, shape.inputs).to(dtype) for shape in layers}
    weights = [
        (torch.randn(shape.outputs, shape.inputs).mul_(0.05).to(dtype), shape)
        for shape in layers
        for _ in range(shape.count)
    ]
    for name, make in ways(dtype, rows, int8).items():
        functions = [(_refined(make(weight), shape), inputs[shape.inputs]) for weight, shape in weights]
        gather([each for each, _ in functions if isinstance(each, NativeLinear)])
        yield name, lambda functions=functions: [each(x) for each, x in functions]  # type: ignore[misc]
        del functions


def _refined(layer: Layer, shape: LinearShape) -> Layer:
    return layer.changed(terms=shape.terms) if isinstance(layer, CompactLinear) else layer


@torch.inference_mode()
def product(layers: list[LinearShape], dtype: torch.dtype, rows: int, int8: bool = False) -> Product:
    """Time the pass of each way, twice in turn."""
    seconds: dict[str, float] = {}
    for _ in range(2):
        for name, run in passes(layers, dtype, rows, int8):
            seconds[name] = min(best_s(run, 3), seconds.get(name, math.inf))
            del run  # frees its weights before those of the next way are made
    elements = sum(layer.outputs * layer.inputs * layer.count for layer in layers)
    way = min(seconds, key=seconds.__getitem__)
    return Product(
        str(dtype).removeprefix("torch."),
        rows,
        2 * elements * rows / seconds[way],
        elements * weight_bytes(way, dtype, int8) / seconds[way],
        way,
        seconds,
        int8,
    )


@torch.inference_mode()
def square_rate(dtype: torch.dtype) -> float:
    """Measure the operations per second of torch's product of two large square matrices."""
    left, right = (torch.randn(_SQUARE, _SQUARE).to(dtype) for _ in range(2))
    return 2 * _SQUARE**3 / best_s(lambda: left @ right)


# -- all of it --------------------------------------------------------------------------------------------------------


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Run the block with that many torch threads. Raises StartError if there are not as many cores: threads that take
    turns measure no limit."""
    if threads > (cores := len(os.sched_getaffinity(0))):
        why = f"this process may use {cores} core{'s' if cores > 1 else ''}"
        raise StartError(f"--threads cannot be {threads}", why, "give at most as many")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(layers: list[LinearShape], threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all limits on ``threads`` threads; ``say`` takes each line of the table as it is measured."""
    with on_threads(threads):
        say(f"{device.cpu_name()}, {threads} of {len(os.sched_getaffinity(0))} cores")
        reads = read_rates()
        for mib, rate in reads.items():
            say(f"read     {mib:5d} MiB             {rate / 1e9:8.1f} GB/s")
        copies = {"memcpy": copy_rate(), "shared memory": shared_copy_rate(), "loopback socket": socket_rate()}
        reading = rate_of(reads, _COPY_BYTES)
        say(f"{'memcpy':<28} {copies['memcpy'] / 1e9:8.1f} GB/s  {copies['memcpy'] / reading:4.0%} of what is read")
        for name in ("shared memory", "loopback socket"):  # these use one thread
            say(f"{name:<28} {copies[name] / 1e9:8.1f} GB/s  {copies[name] / copies['memcpy']:4.0%} of memcpy")
        links = {}
        for name, transport, limit in LINKS:
            rate = statistics.median(wire.measure(transport, LINK_TOKENS, 5))
            links[name] = {"bytes_per_s": rate, "limit": limit, "share": rate / copies[limit]}
            say(f"KV by {name:<22} {rate / 1e9:8.1f} GB/s  {rate / copies[limit]:4.0%} of {limit}")
        products = []
        for dtype in (torch.bfloat16, torch.float32):
            square, measured = square_rate(dtype), [product(layers, dtype, rows) for rows in ROWS]
            most = max(square, *(found.flops_per_s for found in measured))  # the square product need not be the fastest
            say(
                f"product  {str(dtype).removeprefix('torch.'):<9}    square {square / 1e9:8.0f} GFLOP/s"
                f"  {most / 1e9:.0f} at best, of these and of the layers"
            )
            for found in measured:
                reading = rate_of(reads, found.bytes_per_s * found.seconds[found.way])
                multiplied, streamed = found.flops_per_s / most, found.bytes_per_s / reading
                limit = f"{most / 1e9:.0f} GFLOP/s" if multiplied > streamed else f"{reading / 1e9:.1f} GB/s"
                products.append(
                    asdict(found)
                    | {"square_flops_per_s": square, "best_flops_per_s": most, "share": max(multiplied, streamed)}
                )
                say(
                    f"linear   {found.dtype:<9}{found.rows:5d} rows {found.flops_per_s / 1e9:8.0f} GFLOP/s"
                    f" {found.bytes_per_s / 1e9:8.1f} GB/s of weights  {max(multiplied, streamed):4.0%} of {limit}"
                    f"  ({found.way})"
                )
    return {
        "cpu": device.cpu_name(),
        "threads": threads,
        "read_bytes_per_s": reads,
        "copy_bytes_per_s": copies,
        "links": links,
        "linear": products,
    }


def run(config: BenchRooflineConfig) -> int:
    """Print each figure as it is measured."""
    checkpoint = open_checkpoint(config.model or str(builtin.path()))
    neighbours.note(Console(stderr=True, highlight=False))
    figures = measure(shapes(checkpoint.text_config), config.threads, lambda line: print(line, flush=True))
    if config.save:
        results.save(Path(config.save), figures)
    return 0
