"""Tiny tokenizers of the kinds that models use, trained in a moment, each with control tokens of several styles.

Some mark no token as special in ``tokenizer.json``; other files of the checkpoint declare the special tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from string import ascii_letters
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
)
UNMARKED = ("<｜User｜>",)
"""Control tokens that their authors did not mark as special (DeepSeek does this)."""
ORDINARY = ("<think>", "</think>")
"""Added tokens that are ordinary vocabulary."""
CORPUS = """
A block has holders, not an owner. The sender holds source blocks until the receiver has released them, and the
receiver writes only its own memory. What the client asked is a request; its progress on one worker is a sequence; the
hand-off between two workers is a transfer. Every queue has a bound and a metric, every wait has a deadline. 0123456789
def take(self, count: int, holder: str) -> list[int]: return [self.free.pop() for _ in range(count)]
{"json": true, "x": null} [list] (brackets) <b> | _ / . , ; : ! ? ' " Größe, naïve café, 你好世界, привет, and 🙂.
""".splitlines()


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))


def sentencepiece_bpe() -> Tokenizer:
    """Like Llama 2's: no pre-tokenizer, spaces become ▁, unknown characters become bytes. Merges can produce ``</s>``
    too, since it is frequent in the training text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator([*CORPUS, *(f"{letter}</s>" for letter in ascii_letters)], trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = settings["added_tokens"][:1]  # byte tokens are ordinary vocabulary, not added tokens
    return _with_control(Tokenizer.from_str(json.dumps(settings)))


def unigram() -> Tokenizer:
    """Control tokens are also pieces of the model's vocabulary, so ordinary text spelled like one maps to its id."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *CONTROL, *UNMARKED], unk_token="<unk>", show_progress=False
    )
    return _trained(tokenizer, trainer)


def word_piece() -> Tokenizer:
    """Split at white space only, so that a control token is one word of the vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", *CONTROL, *UNMARKED], show_progress=False
    )
    return _trained(tokenizer, trainer)


def unmarked_bpe() -> Tokenizer:
    return _with(byte_level_bpe(), special=False)


def unmarked_word_piece() -> Tokenizer:
    return _with(word_piece(), special=False)


def unlisted_unigram() -> Tokenizer:
    """Control tokens are vocabulary words, not added tokens; only those not marked as special (UNMARKED, ORDINARY) stay
    added tokens."""
    return _with(unigram(), listed=False)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: functools.cache(make)
    for make in (
        byte_level_bpe,
        sentencepiece_bpe,
        unigram,
        word_piece,
        unmarked_bpe,
        unmarked_word_piece,
        unlisted_unigram,
    )
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def checkpoint_files(kind: str) -> dict[str, dict[str, Any]]:
    """Return the checkpoint files beside ``tokenizer.json`` that declare special tokens: file name -> JSON content."""
    files: dict[str, dict[str, Any]] = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    settings = files["tokenizer_config.json"]
    match kind:
        case "unmarked_bpe":
            listed = {"content": "[AVAILABLE_TOOLS]", "special": True, "normalized": False}
            settings["added_tokens_decoder"] = {str(KINDS[kind]().token_to_id("[AVAILABLE_TOOLS]")): listed}
            settings["bos_token"], settings["eos_token"] = "<s>", {"__type": "AddedToken", "content": "</s>"}
            settings["additional_special_tokens"] = ["[INST]", {"__type": "AddedToken", "content": "[/INST]"}]
        case "unmarked_word_piece":
            ids = {text: KINDS[kind]().token_to_id(text) for text in CONTROL}
            ends = [ids["[INST]"], ids["[/INST]"]]
            files["generation_config.json"] = {"eos_token_id": [ids["</s>"], *ends]}
            files["config.json"] = {"text_config": {"pad_token_id": ids["[AVAILABLE_TOOLS]"]}}
            settings |= NAMES
        case "unlisted_unigram":
            files["special_tokens_map.json"] = {
                **{name: {"content": text} for name, text in NAMES.items()},
                "unk_token": "<unk>",
                "pad_token": "[AVAILABLE_TOOLS]",
                "image_token": "[INST]",
                "extra_special_tokens": {
                    "close_token": "[/INST]",
                    **{f"a{at}_token": text for at, text in enumerate(CONTROL) if text.startswith("<|")},
                },
            }
        case _:
            settings |= NAMES
    return files


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_control(tokenizer)


def _with_control(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    for text in (*UNMARKED, *ORDINARY):
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
    return tokenizer


def _with(tokenizer: Tokenizer, *, special: bool | None = None, listed: bool = True) -> Tokenizer:
    """Return a copy with the control tokens marked as special or not, and listed as added tokens or not."""
    settings = json.loads(tokenizer.to_str())
    if special is not None:
        settings["added_tokens"] = [{**token, "special": special} for token in settings["added_tokens"]]
    if not listed:
        settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["special"]]
    return Tokenizer.from_str(json.dumps(settings))
