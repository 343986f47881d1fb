"""Run the grid, or a share of it: ``TRITON_INTERPRET=1 python -m tests.triton.grid [--sample] [--share I/N]``, or on a
GPU ``python -m tests.triton.grid --device cuda``."""

from __future__ import annotations

import argparse
import sys

import torch

from common.attention.interface import AttentionBackend
from common.attention.triton import TritonAttention
from common.kernels.e4m3 import lacks_units
from common.kernels.triton import blocks, decode
from common.kv.storage.interface import KvStorage
from tests.triton import groups
from tests.triton.cases import error_of, grid, sampled
from tests.triton.float8 import wrongly_read, wrongly_stored
from tests.triton.interpreter import patch_language_once

LEAST_SPLIT = 64
"""Fewer positions than in use, so that short sequences have several splits."""


def make(store: KvStorage, splits: int) -> AttentionBackend:
    return TritonAttention(store, splits)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    share, shares = map(int, options.share.split("/"))
    torch.set_num_threads(1)
    patch_language_once()
    decode.LEAST_SPLIT, blocks.few_tiles = LEAST_SPLIT, False
    lacking = lacks_units(torch.device(options.device))
    cases = (sampled if options.sample else grid)(with_fp8=lacking is None)[share::shares]
    wrong = 0
    if lacking is not None:
        print(f"without KV in fp8: {lacking}")
    elif share == 0 and (codes := wrongly_stored(options.device) + wrongly_read(make, options.device)):
        print(f"{codes} numbers are converted wrongly to or from float8")
        wrong += 1
    for case in cases:
        if not (error := error_of(case, make, options.device)) <= 1:
            print(f"{case}: {error:.3g} times the tolerance")
            wrong += 1
    products = groups.cases(sample=True)[share::shares]
    wrong += groups.wrong_of(products, options.device)
    print(f"{len(cases) + len(products)} cases, {wrong} wrong")
    return 1 if wrong or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
