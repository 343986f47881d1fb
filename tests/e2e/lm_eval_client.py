"""Runs lm-eval on local tasks and writes every log-likelihood: ``lm_eval_client.py TASKS OUT MODEL=ARGS...``.

Runs in the environment of lm-eval, which has none of this project. ``TASKS`` is a folder of task files. ``OUT`` gets,
per MODEL, the metrics and the responses of each task.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(tasks: str, out: str, *models: str) -> None:
    lm_eval: Any = importlib.import_module("lm_eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=tasks, include_defaults=False)
    names = sorted(path.stem for path in Path(tasks).glob("*.yaml"))
    found = {}
    for entry in models:
        model, _, arguments = entry.partition("=")
        report = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=names,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            batch_size=1 if "tokenized_requests=False" in arguments else 8,
        )
        samples = {name: sorted(report["samples"][name], key=lambda each: each["doc_id"]) for name in names}
        found[entry] = {
            name: {"results": report["results"][name], "responses": [each["resps"] for each in samples[name]]}
            for name in names
        }
    Path(out).write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
