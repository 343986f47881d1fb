"""Models that come with packages: the built-in one, which is served if none is named, with a notice about it, and
smollm2."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from common.builtin import NAME, path, smollm2
from common.config.coordinator import CoordinatorConfig
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from deploy.launcher.screen import command

_EXAMPLE = "Qwen/Qwen3-0.6B"


M = TypeVar("M", UpConfig, CoordinatorConfig, WorkerConfig)


def with_model(config: M, environ: Mapping[str, str]) -> tuple[M, str]:
    """Return ``config`` with the built-in model if it names none, and the notice to print ("" if it names one). A model
    "smollm2" becomes the path of its file. Raises StartError if that is not installed."""
    if config.model:
        file = smollm2.resolved(config.model)
        if file == config.model:
            return config, ""
        return replace(config, model=file, served_model_name=config.served_model_name or smollm2.NAME), ""
    name = config.served_model_name or NAME
    return replace(config, model=str(path()), served_model_name=name), _notice(config, environ)


def _notice(config: UpConfig | CoordinatorConfig | WorkerConfig, environ: Mapping[str, str]) -> str:
    """Return what the built-in model is for and how to serve another, with the command that started this process."""
    if isinstance(config, WorkerConfig):
        return "using the built-in demo model. If the coordinator serves another model, give its name"
    way = f"{command()} {'up' if isinstance(config, UpConfig) else 'coordinator'} {_EXAMPLE}"
    if "MAKELEVEL" in environ and shutil.which("tandem") is None:
        way = f'make up ARGS="{_EXAMPLE}"'
    return f"serving the built-in demo model: it knows small talk, a tiny world and Tandem. Another model: {way}"
