"""The tokenizer and the chat templates of a GGUF file as files of the tokenizers library and transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.checkpoint.end_tokens import SPELLINGS, is_word_or_sign
from common.checkpoint.gguf import GgufModel
from common.checkpoint.gguf_words import BEGIN, IGNORE_MERGES, PATTERNS
from common.core.errors import StartError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of ``tokenizer.ggml.token_type``."""
_KEY = "tokenizer.ggml."
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "▁"
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Control tokens of Phi 3 after which white space stays."""
_ENDS = ("bos", "eos", "eot", "eom")
_CONTROL_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")


def tokenizer_of(model: GgufModel) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the content of tokenizer.json, that of tokenizer_config.json, and the chat templates by name. Raises
    StartError if the file has none, or one that is not supported."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokens = _list(model, "tokens")
    for name, key in _NAMED.items():
        index = model.metadata.get(f"{_KEY}{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            settings[name] = tokens[index]
    given = model.metadata.get("tokenizer.huggingface.json")
    try:
        text = given if isinstance(given, str) else _built(model, settings).to_str()
        Tokenizer.from_str(text)
    except StartError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise _refused(model, str(error)) from error
    return text, settings, templates_of(model)


def templates_of(model: GgufModel) -> dict[str, str]:
    """Return the chat templates by name, {} if there are none."""
    found = {}
    if isinstance(default := model.metadata.get("tokenizer.chat_template"), str):
        found["default"] = default
    for name in model.metadata.get("tokenizer.chat_templates") or ():
        text = model.metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(text, str) and _TEMPLATE_NAME.fullmatch(str(name)):
            found[str(name)] = text
    return found


def _built(model: GgufModel, settings: Mapping[str, Any]) -> Tokenizer:
    kind = model.metadata.get(f"{_KEY}model")
    if kind == "gpt2":
        tokenizer = _byte_level(model)
    elif kind == "llama":
        tokenizer = _sentencepiece(model, settings)
    else:
        raise _refused(model, f"its kind is {kind}, and only byte-level (gpt2) and sentencepiece (llama) ones are read")
    _add_tokens(model, tokenizer, swallow=kind == "llama" and model.architecture == "phi3")
    _surround(model, tokenizer, settings, begins=kind == "llama" or _pre(model) in BEGIN)
    return tokenizer


def _list(model: GgufModel, name: str) -> list[Any]:
    found = model.metadata.get(_KEY + name)
    if not isinstance(found, list):
        raise _refused(model, f"it has no {_KEY}{name}")
    return found


def _types(model: GgufModel) -> list[int]:
    """Return the kind of each token. Tokens that end a turn, and those of a control token's shape, are control tokens
    whatever the file says: many files of fine-tuned models have them as normal ones, which would be neither one token
    in a prompt nor an end. llama.cpp corrects the end tokens alike."""
    tokens, given = _list(model, "tokens"), model.metadata.get(f"{_KEY}token_type")
    types = list(given) if isinstance(given, list) and len(given) == len(tokens) else [NORMAL] * len(tokens)
    ends = {model.metadata.get(f"{_KEY}{name}_token_id") for name in _ENDS}
    for index, token in enumerate(tokens):
        if types[index] in (NORMAL, USER_DEFINED) and (
            token in SPELLINGS or (index in ends and not is_word_or_sign(token)) or _CONTROL_SHAPE.fullmatch(token)
        ):
            types[index] = CONTROL
    return types


def _pre(model: GgufModel) -> str:
    return str(model.metadata.get(f"{_KEY}pre") or "default")


# -- the two kinds ----------------------------------------------------------------------------------------------------


def _byte_level(model: GgufModel) -> Tokenizer:
    if (patterns := PATTERNS.get(_pre(model))) is None:
        raise _refused(model, f"how its pre-tokenizer {_pre(model)} splits words is not known")
    vocab = dict[str, int]()
    spelling = _spelling()
    letters = set(spelling)
    for index, (token, kind) in enumerate(zip(_list(model, "tokens"), _types(model), strict=True)):
        if kind == UNUSED:
            continue
        if kind == NORMAL and not letters.issuperset(token):  # written as text, not in the alphabet of bytes
            token = "".join(spelling[byte] for byte in token.encode())
        vocab.setdefault(token, index)
    merges = _merges(model, vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=_pre(model) in IGNORE_MERGES))
    if _pre(model) == "qwen2" and model.architecture.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spelling() -> str:
    """Return the letters of the 256 bytes in GPT-2's alphabet."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


def _merges(model: GgufModel, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of ``tokenizer.ggml.merges``, without those that make no token."""
    found = []
    for merge in _list(model, "merges"):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at > 0 and left in vocab and right in vocab and left + right in vocab:
            found.append((left, right))
    return found


def _sentencepiece(model: GgufModel, settings: Mapping[str, Any]) -> Tokenizer:
    tokens, types = _list(model, "tokens"), _types(model)
    gemma = model.architecture.startswith("gemma")
    if gemma:  # tokens of several spaces are written as spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = dict[str, int]()
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != UNUSED:
            vocab.setdefault(token, index)
    if isinstance(model.metadata.get(f"{_KEY}merges"), list):
        merges = _merges(model, vocab)
    else:
        given = model.metadata.get(f"{_KEY}scores")
        scores = [-float(at) for at in range(len(tokens))]  # Gemma's own scores are not the order of its merges
        if not gemma and isinstance(given, list) and len(given) == len(tokens):
            scores = given
        made = {token: scores[index] for token, index in vocab.items() if types[index] in (NORMAL, USER_DEFINED)}
        merges = _merges_of_scores(vocab, made)
    unknown = settings.get("unk_token") or next((t for t, k in zip(tokens, types, strict=True) if k == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefixed = bool(model.metadata.get(f"{_KEY}add_space_prefix", True))
    prepend = [normalizers.Prepend(_SPACE)] if prefixed else []  # also behind a control token, as llama.cpp does
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokenizer


def _merges_of_scores(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges that a sentencepiece model implies: all pairs that make a token of ``scores``, in the order in
    which sentencepiece prefers their results."""
    found = list[tuple[float, int, int, str, str]]()
    for token, score in scores.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = sorted(
            (vocab[left], vocab[right], left, right) for left, right in splits if {left, right} <= vocab.keys()
        )
        found += ((-score, -len(left), -len(right), left, right) for _, _, left, right in pairs)
    return [(left, right) for *_, left, right in sorted(found, key=lambda each: each[:3])]


# -- added tokens -----------------------------------------------------------------------------------------------------


def _add_tokens(model: GgufModel, tokenizer: Tokenizer, *, swallow: bool) -> None:
    """Add the control tokens, as special ones, and those that users defined. They keep their ids, as they are in the
    vocabulary. ``swallow``: control tokens take the white space behind them."""
    special, plain = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(_list(model, "tokens"), _types(model), strict=True):
        if not token or tokenizer.token_to_id(token) is None:
            continue
        if kind in (CONTROL, UNKNOWN):
            rstrip = swallow and token not in _KEEP_SPACE
            special.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _surround(model: GgufModel, tokenizer: Tokenizer, settings: Mapping[str, Any], *, begins: bool) -> None:
    """Have the tokenizer put the tokens around a text that the file asks for. ``begins``: whether it puts one in front
    if the file does not say."""
    before = settings.get("bos_token") if model.metadata.get(f"{_KEY}add_bos_token", begins) else None
    after = settings.get("eos_token") if model.metadata.get(f"{_KEY}add_eos_token", False) else None
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    used = [text for text in dict.fromkeys((before, after)) if text]
    if used and all(tokenizer.token_to_id(text) is not None for text in used):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, "$B:1"],
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in used],
        )  # fmt: skip


def _refused(model: GgufModel, why: str) -> StartError:
    return StartError(
        f"cannot read the tokenizer of {model.files[0]}", why, "use the model's checkpoint in safetensors format"
    )


def text_files(model: GgufModel, config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of a directory from which text and configuration are read, by name."""
    tokenizer, settings, templates = tokenizer_of(model)
    settings["model_max_length"] = config["max_position_embeddings"]
    files = {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps(generation),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(settings),
    }
    if templates:
        files["chat_template.jinja"] = templates.get("default") or next(iter(templates.values()))
        named = {name: text for name, text in templates.items() if name != "default"}
        files |= {f"additional_chat_templates/{name}.jinja": text for name, text in named.items()}
    return files
