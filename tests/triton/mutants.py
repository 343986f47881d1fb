"""Change one line of a kernel's source, and see the tests fail: ``TRITON_INTERPRET=1 python -m tests.triton.mutants``.

Prints one line per mutant; the exit code is 1 if one of them was not caught, or if the kernels fail unchanged.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.attention.interface import AttentionBackend, Params, Span
from common.attention.torch_reference import TorchReference
from common.kernels import triton as package
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.tensors import KvStore
from tests.triton.cases import Case, Make, error_of
from tests.triton.float8 import wrongly_stored
from tests.triton.grid import LEAST_SPLIT
from tests.triton.interpreter import patch_language_once


class Mutant(NamedTuple):
    """A fault: in ``module`` the line ``right`` becomes ``wrong``, and ``fails`` must then be true."""

    name: str
    module: str
    right: str
    wrong: str
    fails: Callable[[Make], bool]


def at(shape: str, option: str, heads: str = "grouped", setup: str = "float32, blocks of 16") -> Callable[[Make], bool]:
    """Return a check of one case of the grid, which is true if the case fails."""
    return lambda make: not error_of(Case(shape, option, heads, setup), make) <= 1


def far(rows: int) -> Callable[[Make], bool]:
    """Return a check in a pool of more than 2**31 elements, of which only the pages in use exist."""

    def fails(make: Make) -> bool:
        layer, layers = LayerLayout(8, 128, 128), 32
        store = KvStore(KvMemory(KvLayout((layer,) * layers, "bfloat16", 16), 2100))
        assert store.k(0).stride(0) * store.blocks > 1 << 31
        spans = [Span(0, rows, 33 - rows, [2098, 3, 2099])]
        torch.manual_seed(0)
        for block in spans[0].blocks:
            for part in (store.k(layers - 1), store.v(layers - 1)):
                part[block] = torch.randn(part[block].shape).to(part)
        query, params = torch.randn(rows, 8, 128).to(store.dtype), Params(128**-0.5)
        try:
            oracle, backend = TorchReference(store), make(store, 1)
            expected = oracle.attend(oracle.plan(spans), layers - 1, query, params).float()
            got = backend.attend(backend.plan(spans), layers - 1, query, params).float()
            return not float((got - expected).abs().max()) <= 0.05
        finally:
            store.close()

    return fails


def in_fp8(shape: str) -> Callable[[Make], bool]:
    """Return a check of one case with KV in fp8."""
    return at(shape, "plain", setup="fp8 of float32, blocks of 16, 3 splits")


def misstored(_: Make) -> bool:
    """Check the codes that are stored in a pool in fp8."""
    return wrongly_stored(dtypes=(torch.float32,)) > 0


def miscomputed(name: str, width: int = 512) -> Callable[[Make], bool]:
    """Return a check of products with a weight of a format of :mod:`tests.triton.groups`."""

    def fails(_: Make) -> bool:
        module: Any = importlib.import_module("tests.triton.groups")
        module.multiply = importlib.import_module(f"{package.__name__}.groups").multiply
        return not all(
            module.error_of(module.Case(name, 17, 70, width, torch.float32, bias), "cpu") <= 1 for bias in (False, True)
        )

    return fails


_ERROR = 2
"""Exit code of a child whose check raised."""
_BLOCK = "mask=seen, other=0).to(tl.int64)"
MUTANTS = (
    Mutant("32-bit offsets in decode", "decode", _BLOCK, _BLOCK.replace("int64", "int32"), far(1)),
    Mutant(
        "32-bit offsets in prefill", "prefill", "mask=known, other=0).to(tl.int64)",
        "mask=known, other=0).to(tl.int32)", far(2),
    ),
    Mutant(
        "no window bound in decode", "decode", "seen = (at < high) & (at >= first)", "seen = at < high",
        at("decode", "window"),
    ),
    Mutant(
        "no window bound in prefill", "prefill", "seen = seen & (at[None, :] > own[:, None] - WINDOW)", "seen = seen",
        at("chunks", "window"),
    ),
    Mutant(
        "a dropped split", "decode", "for split in range(count):", "for split in range(count - 1):",
        at("long", "plain", setup="bfloat16, blocks of 16, 4 splits"),
    ),
    Mutant(
        "an unmasked tail in decode", "decode", "seen = (at < high) & (at >= first)", "seen = at >= first",
        at("decode", "plain"),
    ),
    Mutant("an unmasked tail in prefill", "prefill", "known = at < end", "known = at < end + N", at("chunks", "plain")),
    Mutant(
        "a chunk that sees its future", "prefill", "seen = at[None, :] <= own[:, None]", "seen = known[None, :]",
        at("prompts", "plain"),
    ),
    Mutant(
        "sinks without a value's weight", "blocks", "total = total * shrink + tl.exp2(logit - highest)",
        "total = total * shrink", at("mixed", "sinks"),
    ),
    Mutant(
        "the scale of another head in decode", "decode", "tl.load(KScales + kv_head)", "tl.load(KScales)",
        in_fp8("decode"),
    ),
    Mutant(
        "the scale of another head in prefill", "prefill", "tl.load(VScales + kv_head)", "tl.load(VScales)",
        in_fp8("prompts"),
    ),
    Mutant("halves of bytes in turn", "groups", "low + half, width", "low + 1, width", miscomputed("Q4_0")),
    Mutant("the scale of another group", "groups", "group = byte // half", "group = byte // K", miscomputed("Q6_K")),
    Mutant(
        "columns out of order", "groups", "column = tl.load(Order + column", "tl.load(Order + column",
        miscomputed("GPTQ"),
    ),
    Mutant("an unmasked tail of a width", "groups", "known & (column < width)", "known", miscomputed("Q8_0", 500)),
    Mutant(
        "minima without their second level", "groups", "minimum *= tl.load(SubMinima", "tl.load(SubMinima",
        miscomputed("Q2_K"),
    ),
    Mutant(
        "ties away from zero in float8", "float8", "0x7FFFF + (size >> 20 & 1)", "0x80000", misstored,
    ),
)  # fmt: skip


def backend_of(folder: Path) -> Make:
    """Import the kernels from ``folder`` and return how to make their backend."""
    package.__path__[:] = [str(folder)]
    names = [name for name in sys.modules if name.startswith(f"{package.__name__}.")]
    for name in (*names, "common.attention.step_buffer", "common.attention.triton"):
        sys.modules.pop(name, None)
    for name in names:
        vars(package).pop(name.rpartition(".")[2], None)  # else an import from the package finds the old module
    backend = importlib.import_module("common.attention.triton").TritonAttention
    importlib.import_module(f"{package.__name__}.decode").LEAST_SPLIT = LEAST_SPLIT

    def make(store: KvStorage, splits: int) -> AttentionBackend:
        made: AttentionBackend = backend(store, splits)
        return made

    return make


def fails_in_child(mutant: Mutant, folder: Path) -> bool:
    """Return whether the check fails with the kernels in ``folder``, in a child process: a read at a wrong address may
    kill it."""
    if (child := os.fork()) == 0:
        code = _ERROR
        try:
            code = int(mutant.fails(backend_of(folder)))
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGSEGV
    assert os.WEXITSTATUS(status) != _ERROR, f"the check for {mutant.name!r} ended with an exception"
    return bool(os.WEXITSTATUS(status))


def main() -> int:
    torch.set_num_threads(1)
    patch_language_once()
    own, bad = Path(package.__path__[0]), 0
    right = backend_of(own)
    for check in MUTANTS:
        if check.fails(right):
            print(f"the kernels fail the check for {check.name!r} without the fault")
            bad += 1
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(shutil.copytree(own, Path(directory) / "kernels"))
            source = folder / f"{mutant.module}.py"
            text = source.read_text()
            assert text.count(mutant.right) == 1, f"{mutant.right!r} is not one place of {mutant.module}"
            source.write_text(text.replace(mutant.right, mutant.wrong))
            caught = fails_in_child(mutant, folder)
        print(f"{'caught' if caught else 'NOT CAUGHT'}: {mutant.name}")
        bad += not caught
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
