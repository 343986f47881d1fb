"""Stages for tests of ``tandem bench gpu``: one that ends well and three that do not."""

from __future__ import annotations

import os
import threading

from bench.goals.figures import Row
from bench.gpu.stages import Setting


def good(setting: Setting) -> list[Row]:
    return [Row("", "a figure", "GB/s", 2.0, (), detail={"copy_bytes_per_s": 2e9})]


def fails(setting: Setting) -> list[Row]:
    raise ValueError("no kernel of that name")


def dies(setting: Setting) -> list[Row]:
    os._exit(7)


def hangs(setting: Setting) -> list[Row]:
    threading.Event().wait()
    return []
