"""The model that is served when none is named: the small one that comes with Tandem, and what is said about it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from common.builtin import NAME, path
from common.config.coordinator import CoordinatorConfig
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from deploy.launcher.screen import command

_EXAMPLE = "Qwen/Qwen3-0.6B"


M = TypeVar("M", UpConfig, CoordinatorConfig, WorkerConfig)


def with_model(config: M, environ: Mapping[str, str]) -> tuple[M, str]:
    """The same, with the built-in model where none is named, and what to say about it."""
    if config.model:
        return config, ""
    name = config.served_model_name or NAME
    return replace(config, model=str(path()), served_model_name=name), _notice(config, environ)


def _notice(config: UpConfig | CoordinatorConfig | WorkerConfig, environ: Mapping[str, str]) -> str:
    """What it is good for, and how to name another, in the words that this process was started by."""
    if isinstance(config, WorkerConfig):
        return "for trying. Name the model that the coordinator serves if it is another"
    way = f"{command()} {'up' if isinstance(config, UpConfig) else 'coordinator'} {_EXAMPLE}"
    if "MAKELEVEL" in environ and shutil.which("tandem") is None:
        way = f'make up ARGS="{_EXAMPLE}"'
    return f"for trying: it knows small talk, a tiny world and Tandem. Another model: {way}"
