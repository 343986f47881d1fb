"""The built-in model: a small Llama that is served when no other model is named.

``path()`` is a checkpoint directory like any other (config, bf16 weights, tokenizer, chat template, model card), and
``draft_path()`` that of its draft model for speculative decoding. ``bench/builtin_model`` has the code that made them.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
NAME = "tandem-builtin"


def path() -> Path:
    """Return the checkpoint directory of the built-in model."""
    return _HERE / "model"


def draft_path() -> Path:
    """Return the checkpoint directory of the draft model, which has the same tokenizer."""
    return path() / "draft"
