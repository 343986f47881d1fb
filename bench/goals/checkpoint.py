"""The checkpoint that the goals are stated for: a Llama of 82 million parameters with random weights, made here.

Speed depends on the shape and the type of the weights, not on their values. All systems must be able to read the
checkpoint, so it is a Hugging Face folder in bfloat16, with a byte-level tokenizer trained on Python's standard
library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

SEED, VOCABULARY, POSITIONS = 0, 8192, 8192
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 768, 12, 12, 4, 2048
SPREAD = 0.05
"""Standard deviation of the weights, large enough that an answer is not one token repeated."""
_SPECIALS = ("<|begin|>", "<|end|>")


def make(folder: Path) -> Path:
    """Return ``folder``, written if it does not exist."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        intermediate_size=INTERMEDIATE, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=True, initializer_range=SPREAD,
    )  # fmt: skip
    save_tokenizer(folder)
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of ``VOCABULARY`` tokens for a checkpoint in ``folder``."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_tokenizer(), bos_token=_SPECIALS[0], eos_token=_SPECIALS[1], model_max_length=POSITIONS
    )
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found.train_from_iterator((source.read_text(encoding="utf-8", errors="replace") for source in sources), trainer)
    return found
