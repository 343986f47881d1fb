"""The built-in model: a small Llama that is served when no other model is named, and all that it was made from.

``path()`` is a checkpoint directory like any other (config, bf16 weights, tokenizer, chat template, model card), and
``draft_path()`` that of its draft for speculative decoding. ``corpus`` generates the text it learnt, ``checks`` judges
its answers, ``training`` makes the files again from a seed. Only ``training`` may import torch.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
NAME = "tandem-builtin"


def path() -> Path:
    """The checkpoint directory of the built-in model."""
    return _HERE / "model"


def draft_path() -> Path:
    """The checkpoint directory of the draft, which shares the tokenizer."""
    return path() / "draft"
