"""The tokenizer that is rebuilt from a GGUF file's metadata makes the tokens of the original one."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from common.checkpoint.gguf import GgufModel
from common.checkpoint.gguf_tokenizer import text_files, tokenizer_of
from common.checkpoint.gguf_words import GPT2, LLAMA3, PATTERNS, QWEN2
from common.core.errors import StartError
from tests.checkpoints.makers import write
from tests.tiny_tokenizers import CORPUS

CONTROL = ("<|im_start|>", "<|im_end|>")
TEXTS = (
    *("Hello  world, naïve café 1234567 x1y22", "It's HE'LL we've", "你好世界 and 🙂, привет! こんにちは"),
    *("def take(self):\n    return  [1,\t2]\n\n\n x", " leading, trailing ", "\n", "a\r\n\r\nb   c", "É é e\u0301"),
    *("<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|> b", "$a+b=c^2`~| <x> 12,345.67"),
)


def model_of(kind: str, tokens: list[str], types: list[int], architecture: str = "llama", **more: Any) -> GgufModel:
    """Return a model with only a tokenizer; ``more``: further entries of ``tokenizer.ggml``."""
    entries = {"model": kind, "tokens": tokens, "token_type": types} | more
    metadata = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    return GgufModel(architecture, metadata, {}, (Path("x.gguf"),), b"")


# -- byte-level -------------------------------------------------------------------------------------------------------

LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
ORIGINALS: dict[str, Any] = {
    # as the models' own tokenizer.json have them
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "starcoder": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), LEVEL]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), LEVEL]),
    "deepseek-v3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(PATTERNS["deepseek-v3"][2]), "isolated"),
            LEVEL,
        ]
    ),
}


@functools.cache
def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ORIGINALS[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<|endoftext|>", *CONTROL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, "1234567 12 345", "\n\n\n", "you've it's"], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def byte_level(pre: str, **more: Any) -> tuple[Tokenizer, GgufModel]:
    """Return a tokenizer, and the model of a file that was written from it."""
    original = trained(pre)
    vocab = sorted(original.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    kinds = dict.fromkeys(("<|endoftext|>", *CONTROL), 3) | {"<think>": 4}
    merges = json.loads(original.to_str())["model"]["merges"]
    tokens, types = [text for text, _ in vocab], [kinds.get(text, 1) for text, _ in vocab]
    tokens, types = [*tokens, "[PAD481]", "[PAD482]"], [*types, 5, 5]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    architecture = "qwen3" if pre == "qwen2" else "llama"
    return original, model_of("gpt2", tokens, types, architecture, pre=pre, merges=pairs, **more)


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_tokenizers(pre: str) -> None:
    original, model = byte_level(pre, bos_token_id=0, eos_token_id=2, add_bos_token=False)
    built = Tokenizer.from_str(tokenizer_of(model)[0])
    for text in (*TEXTS, "<think>so</think>"):
        assert built.encode(text).ids == original.encode(text).ids, text
        ids = original.encode(text).ids
        for skip in (True, False):
            assert built.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
    assert built.token_to_id("[PAD481]") is None
    assert built.get_vocab_size() == original.get_vocab_size()


@pytest.mark.parametrize("pre", PATTERNS)
def test_every_pattern_compiles_and_keeps_the_text(pre: str) -> None:
    _, model = byte_level("gpt-2")
    changed = GgufModel("llama", {**model.metadata, "tokenizer.ggml.pre": pre}, {}, model.files, b"")
    built = Tokenizer.from_str(tokenizer_of(changed)[0])
    for text in TEXTS:
        assert built.decode(built.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_are_split_as_the_model_learnt_it() -> None:
    """With GPT-2's pattern alone a number would be one word."""
    for pre, count in (("smollm", 4), ("qwen2", 4), ("llama-bpe", 2), ("gpt-2", 1)):
        words = [pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS[pre]]
        assert len(pre_tokenizers.Sequence(words).pre_tokenize_str("1234")) == count
    assert PATTERNS["smollm"] == (r"\p{N}", GPT2)


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("gpt-2", {}, (False, False)),
        ("gpt-2", {"add_bos_token": True}, (True, False)),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"add_bos_token": False}, (False, False)),
    ],
)
def test_tokens_around_a_text(pre: str, flags: dict[str, bool], around: tuple[bool, bool]) -> None:
    _, model = byte_level(pre, bos_token_id=1, eos_token_id=2, **flags)
    text, settings, _ = tokenizer_of(model)
    ids = Tokenizer.from_str(text).encode("a").ids
    assert (ids[0] == 1, ids[-1] == 2) == around
    assert (settings["bos_token"], settings["eos_token"]) == CONTROL


def test_a_tokenizer_json_in_the_file_is_used(tmp_path: Path) -> None:
    original, model = byte_level("llama-bpe")
    metadata = {**model.metadata, "tokenizer.huggingface.json": original.to_str(), "tokenizer.ggml.pre": "unheard-of"}
    assert Tokenizer.from_str(tokenizer_of(GgufModel("llama", metadata, {}, model.files, b""))[0]).to_str() == (
        original.to_str()
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"pre": "unheard-of"}, "unheard-of"),
        ({"model": "bert"}, "bert"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
    ],
)
def test_tokenizers_that_are_not_read(entries: dict[str, Any], words: str) -> None:
    _, model = byte_level("gpt-2")
    changed = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    with pytest.raises(StartError) as caught:
        tokenizer_of(GgufModel("llama", {**model.metadata, **changed}, {}, model.files, b""))
    assert words in caught.value.why and "safetensors" in caught.value.todo


# -- sentencepiece ----------------------------------------------------------------------------------------------------


@functools.cache
def sentencepiece_model(prefix: bool = True) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, "a  b   c"] * 4), model_writer=written, model_type="bpe", minloglevel=2,
        vocab_size=520, byte_fallback=True, control_symbols=list(CONTROL), user_defined_symbols=["<think>"],
        add_dummy_prefix=prefix, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    return written.getvalue()


def pieces(prefix: bool = True) -> tuple[Any, list[str], list[float], list[int]]:
    """Return the model, and its tokens, scores and types as a file has them."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(prefix))
    ids = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(at) else 3 if model.is_control(at) else 6 if model.is_byte(at) else 1 for at in ids]
    tokens = [model.id_to_piece(at) for at in ids]
    kinds = [4 if token == "<think>" else kind for token, kind in zip(tokens, kinds, strict=True)]
    return model, tokens, [model.get_score(at) for at in ids], kinds


NAMED = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
PLAIN = (*TEXTS[:8], TEXTS[10], "x  y    z", "\tx")


def test_sentencepiece_tokenizers_are_those_of_sentencepiece() -> None:
    model, tokens, scores, types = pieces()
    text, _, _ = tokenizer_of(model_of("llama", tokens, types, scores=scores, **NAMED))
    built = Tokenizer.from_str(text)
    for each in PLAIN:
        assert built.encode(each).ids == [1, *model.encode(each)], each
        assert built.decode(built.encode(each).ids) == each
    assert built.encode("a<|im_end|>").ids[-1] == tokens.index("<|im_end|>")
    assert tokens.index("<think>") in built.encode("b<think>c").ids


def test_sentencepiece_tokenizers_are_those_of_transformers(tmp_path: Path) -> None:
    """The texts have no control tokens and no spaces in front, where transformers' class differs."""
    _, tokens, scores, types = pieces()
    path = write(tmp_path, {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}})
    (path / "tokenizer.model").write_bytes(sentencepiece_model())
    theirs: Any = AutoTokenizer.from_pretrained(path)
    built = Tokenizer.from_str(tokenizer_of(model_of("llama", tokens, types, scores=scores, **NAMED))[0])
    for each in PLAIN:
        if not each.startswith(" "):
            expected = theirs.encode(each, add_special_tokens=False)
            assert built.encode(each, add_special_tokens=False).ids == expected, each


def test_a_space_is_put_before_a_text_behind_a_control_token() -> None:
    model, tokens, scores, types = pieces()
    built = Tokenizer.from_str(tokenizer_of(model_of("llama", tokens, types, scores=scores, **NAMED))[0])
    assert built.encode("<|im_end|>the").ids == [1, tokens.index("<|im_end|>"), *model.encode("the")]


def test_merges_of_the_file_are_used() -> None:
    _, tokens, scores, types = pieces()
    implied = Tokenizer.from_str(tokenizer_of(model_of("llama", tokens, types, scores=scores, **NAMED))[0])
    given = model_of("llama", tokens, types, scores=scores, merges=["a b"], **NAMED)
    bare = Tokenizer.from_str(tokenizer_of(given)[0])
    assert len(bare.encode("Hello world").ids) > len(implied.encode("Hello world").ids)


def test_spaces_before_a_text(tmp_path: Path) -> None:
    model, tokens, scores, types = pieces()
    for prefixed in (True, False):
        named = NAMED | {"add_space_prefix": prefixed, "add_bos_token": False}
        built = Tokenizer.from_str(tokenizer_of(model_of("llama", tokens, types, scores=scores, **named))[0])
        assert built.encode("the").tokens[0].startswith("▁") == prefixed
        assert built.decode(built.encode("the end").ids) == "the end"
    assert model.encode("the")


def test_gemma_spells_spaces_and_orders_by_place() -> None:
    model, tokens, _, types = pieces(prefix=False)
    spelled = [" " * len(token) if set(token) == {"▁"} and len(token) > 1 else token for token in tokens]
    assert spelled != tokens
    named = NAMED | {"add_space_prefix": False, "scores": [-1000.0] * len(tokens)}
    built = Tokenizer.from_str(tokenizer_of(model_of("llama", spelled, types, "gemma2", **named))[0])
    for each in (*PLAIN, "a    b"):
        assert built.encode(each).ids == [1, *model.encode(each)], each
        assert built.decode(built.encode(each).ids) == each


def test_phi_3_swallows_space_behind_control_tokens() -> None:
    _, tokens, scores, types = pieces()
    built = Tokenizer.from_str(tokenizer_of(model_of("llama", tokens, types, "phi3", scores=scores, **NAMED))[0])
    assert built.encode("<|im_end|>\n the").ids == built.encode("<|im_end|>the").ids
    other = Tokenizer.from_str(tokenizer_of(model_of("llama", tokens, types, scores=scores, **NAMED))[0])
    assert other.encode("<|im_end|>\n the").ids != other.encode("<|im_end|>the").ids


def test_files_of_a_directory() -> None:
    _, model = byte_level("gpt-2", eos_token_id=2)
    named = {"tokenizer.chat_template": "T", "tokenizer.chat_templates": ["rag", "../x"],
             "tokenizer.chat_template.rag": "R", "tokenizer.chat_template.../x": "X"}  # fmt: skip
    found = text_files(
        GgufModel("llama", {**model.metadata, **named}, {}, model.files, b""), {"max_position_embeddings": 9}, {}
    )
    assert found["chat_template.jinja"] == "T" and found["additional_chat_templates/rag.jinja"] == "R"
    assert not any(".." in name for name in found)
