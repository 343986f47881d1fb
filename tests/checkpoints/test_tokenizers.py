"""Text becomes the tokens that transformers makes of it, whichever files of the checkpoint hold the tokenizer."""

from __future__ import annotations

import base64
import functools
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from common.checkpoint import convert_tokenizer
from common.checkpoint.files import Checkpoint, open_checkpoint
from common.core.errors import StartError
from common.model import tokenizer_child
from coordinator.text.tokenizer import TextModel
from tests.checkpoints.makers import bytes_tokenizer, write
from tests.tiny_tokenizers import CORPUS, KINDS

CONTROL = ("<|im_start|>", "<|im_end|>")
TEXTS = (
    "Hello  world, naïve café 1234567 x1y22",
    "你好世界 and 🙂, привет!",
    "def take(self):\n    return  [1,\t2]\n\n",
    " leading, trailing ",
    "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path: Path) -> tuple[Checkpoint, TextModel]:
    checkpoint = open_checkpoint(str(path))
    return checkpoint, TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size)


def check_equal(text: TextModel, path: Path, texts: tuple[str, ...] = TEXTS) -> None:
    """Compare encoding and decoding with AutoTokenizer's of the original directory."""
    theirs: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    for each in texts:
        for special in (True, False):
            expected = theirs.encode(each, add_special_tokens=special)
            assert text.encode(each, add_special_tokens=special) == expected, (each, special)
        for skip in (True, False):
            shown = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert text.decode(expected, skip_special_tokens=skip) == shown, (each, skip)


# -- without tokenizer.json -------------------------------------------------------------------------------------------


@functools.cache
def sentencepiece_model(kind: str) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4), model_writer=written, model_type=kind, minloglevel=2,
        vocab_size=500 if kind == "bpe" else 380, byte_fallback=True, user_defined_symbols=list(CONTROL),
        normalization_rule_name="identity", remove_extra_whitespaces=False, pad_id=3,
    )  # fmt: skip
    return written.getvalue()


def model_file(kind: str, name: str = "tokenizer.model") -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(sentencepiece_model(kind)) and None


def vocab_and_merges(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(path))


def words(path: Path) -> None:
    letters = sorted({char for line in CORPUS for char in line.lower() if not char.isspace()})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{char}" for char in letters), "hello"]
    (path / "vocab.txt").write_text("\n".join(vocab), encoding="utf-8")


def ranks(path: Path) -> None:
    """A tiktoken file: every byte, and merged tokens in the order of their ranks."""
    pairs = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"12", b"123", "你".encode()[:2], "你".encode()]
    tokens = [bytes([byte]) for byte in range(256)] + pairs
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (path / "tiktoken.model").write_text("\n".join(lines))


CHATML = {"extra_special_tokens": list(CONTROL)}
WITHOUT: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
    # class -> (model type, tokenizer_config.json, what writes the files)
    "LlamaTokenizer": ("llama", CHATML, model_file("bpe")),
    "LlamaTokenizer, no space in front": ("llama", CHATML | {"add_prefix_space": False}, model_file("bpe")),
    "LlamaTokenizer, unigram": (
        "llama",
        CHATML | {"tokenizer_class": "PreTrainedTokenizerFast"},
        model_file("unigram"),
    ),
    "GemmaTokenizer": ("gemma", CHATML, model_file("bpe")),
    "XLMRobertaTokenizer": ("llama", {}, model_file("unigram", "sentencepiece.bpe.model")),
    "CamembertTokenizer": ("llama", {}, model_file("unigram", "sentencepiece.bpe.model")),
    "T5Tokenizer": ("llama", {"extra_ids": 0}, model_file("unigram", "spiece.model")),
    "CodeLlamaTokenizer": ("llama", {}, model_file("bpe")),
    "GPT2Tokenizer": ("gpt2", CHATML, vocab_and_merges),
    "Qwen2Tokenizer": ("qwen2", CHATML | {"eos_token": "<|im_end|>"}, vocab_and_merges),
    "RobertaTokenizer": ("llama", CHATML, vocab_and_merges),
    "CodeGenTokenizer": ("llama", CHATML, vocab_and_merges),
    "BertTokenizer": ("llama", {}, words),
    "BartTokenizer": ("llama", {}, vocab_and_merges),
    "PreTrainedTokenizerFast": ("llama", CHATML, ranks),
}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let the child's function run in this process, which has imported transformers; return its commands."""
    commands = list[list[str]]()

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        answer = tokenizer_child.main(Path(command[3]), Path(command[4]), "trust" in command)
        return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")

    monkeypatch.setattr(convert_tokenizer.subprocess, "run", run)
    return commands


@pytest.mark.parametrize("family", WITHOUT)
def test_tokenizers_without_tokenizer_json_are_converted(
    family: str, tmp_path: Path, in_process: list[list[str]]
) -> None:
    kind, settings, make = WITHOUT[family]
    named = {"tokenizer_class": family.partition(",")[0]} | settings
    size = {words: 280, ranks: 280}.get(make, 700)
    config = {"model_type": kind, "architectures": None, "vocab_size": size}
    path = write(tmp_path / "model", {"config.json": config, "tokenizer_config.json": named})
    make(path)
    checkpoint, text = opened(path)
    assert checkpoint.source == path != checkpoint.path and "there is no tokenizer.json" in checkpoint.notes[0]
    check_equal(text, path)
    assert not (path / "tokenizer.json").exists()
    again, _ = opened(path)
    assert again.path == checkpoint.path and len(in_process) == 1  # it is kept
    assert again.fingerprint == checkpoint.fingerprint


def test_the_child_process_converts_and_the_model_is_found_beside(tmp_path: Path) -> None:
    path = write(tmp_path / "model", {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}})
    model_file("bpe")(path)
    checkpoint, text = opened(path)
    assert checkpoint.model_directory == path and checkpoint.weight_files == (path / "model.safetensors",)
    check_equal(text, path)
    assert checkpoint.eos_token_ids == (2,)  # the class's own </s>


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a broken model file": ({"tokenizer.model": "nothing"}, "tiktoken"),
    "tiktoken without its code": ({"qwen.tiktoken": "YQ== 0"}, "--trust-remote-code"),
    "another model's": ({"tiktoken.model": "YQ== 0", "config.json": {"vocab_size": 100_000}}, "but the model 100,000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_said(case: str, tmp_path: Path, in_process: list[list[str]]) -> None:
    files, words = REFUSED[case]
    path = write(tmp_path / "model", {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}} | files)
    with pytest.raises(StartError) as caught:
        opened(path)
    assert words in caught.value.why and "save_pretrained" in caught.value.todo


class OverRanks:
    """A tokenizer as the Python code of some checkpoints has it."""

    pat_str = r"\p{N}|[^\p{N}]+"
    special_tokens: dict[str, int]
    special_tokens_map = {"eos_token": CONTROL[1]}


@pytest.mark.parametrize(("ids", "fits"), [((267, 268), True), ((400, 401), False)])
def test_the_pattern_of_trusted_code_is_used(
    ids: tuple[int, int], fits: bool, tmp_path: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = OverRanks()
    tokenizer.special_tokens = dict(zip(CONTROL, ids, strict=True))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    path = write(tmp_path / "model", {})
    ranks(path)
    (path / "tiktoken.model").rename(path / "x.tiktoken")
    if not fits:  # its tokens would have other ids
        with pytest.raises(StartError, match="tokenizer"):
            convert_tokenizer.readable_text("m", path, 280, trust=True)
        return
    text = TextModel(convert_tokenizer.readable_text("m", path, 280, trust=True)[0], vocab_size=280)
    assert text.encode(f"123{CONTROL[1]}") == [ord("1"), ord("2"), ord("3"), 268]  # each digit is a word


def test_a_converter_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(convert_tokenizer, "CHILD", "tests.checkpoints.hanging")
    monkeypatch.setattr(convert_tokenizer, "TIMEOUT_S", 0.5)
    path = write(tmp_path / "model", {"tokenizer.model": "x"})
    with pytest.raises(StartError, match="tokenizer") as caught:
        opened(path)
    assert "longer than" in caught.value.why
    assert not list((cache / "text").iterdir())


# -- tokens that only other files have --------------------------------------------------------------------------------


def entry(text: str, special: bool = True, **flags: Any) -> dict[str, Any]:
    return {"content": text, "special": special, "normalized": False} | flags


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
BARE = bytes_tokenizer("<s>", "</s>")
SIDE: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    # files -> ids of tokens
    "added_tokens_decoder": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"258": entry(CONTROL[0]), "259": entry(CONTROL[1])}}},
        {CONTROL[0]: 258, CONTROL[1]: 259},
    ),
    "out of order, not special": (
        {"tokenizer_config.json": {
            "added_tokens_decoder": {"259": entry(CONTROL[1], special=False), "258": entry(CONTROL[0], rstrip=True)}
        }},
        {CONTROL[0]: 258, CONTROL[1]: 259},
    ),
    "added_tokens.json": (
        {"added_tokens.json": {CONTROL[0]: 258, CONTROL[1]: 259}, "tokenizer_config.json": {"eos_token": CONTROL[1]}},
        {CONTROL[0]: 258, CONTROL[1]: 259},
    ),
    "special_tokens_map.json": (
        {"special_tokens_map.json": {"eos_token": CONTROL[1], "additional_special_tokens": [CONTROL[0]]}},
        {CONTROL[1]: 258, CONTROL[0]: 259},
    ),
    "a word of the vocabulary": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"64": entry("a", special=False)}}}, {"a": 64},
    ),
}  # fmt: skip


def side_files(files: dict[str, Any]) -> dict[str, Any]:
    settings = FAST | files.get("tokenizer_config.json", {})
    return {"tokenizer.json": BARE.to_str()} | files | {"tokenizer_config.json": settings}


@pytest.mark.parametrize("case", SIDE)
def test_tokens_of_other_files_are_tokens(case: str, tmp_path: Path) -> None:
    files, ids = SIDE[case]
    path = write(tmp_path / "model", side_files(files))
    checkpoint, text = opened(path)
    assert {each: text.tokenizer.token_to_id(each) for each in ids} == ids
    assert "tokenizer.json is used with" in " ".join(checkpoint.notes)
    in_file = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))  # what grammars read
    assert {each: in_file.token_to_id(each) for each in ids} == ids
    check_equal(text, path)


def test_tokens_that_the_model_has_no_ids_for_are_left_out(tmp_path: Path) -> None:
    """Grammars could not be compiled with them, and a prompt with one could not be computed."""
    tokenizer = bytes_tokenizer("<s>", "</s>", "[PAD]")
    declared = {"added_tokens_decoder": {"259": entry("<x>")}, "pad_token": "[PAD]"}
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": FAST | declared}
    for size, kept in ((258, 0), (259, 1), (260, 2)):
        config = {"config.json": {"vocab_size": size}}
        checkpoint, text = opened(write(tmp_path / str(size), files | config))
        ids = {"<s>": 256, "</s>": 257} | dict([("[PAD]", 258), ("<x>", 259)][:kept])
        assert {token.content: at for at, token in text.tokenizer.get_added_tokens_decoder().items()} == ids
        LLTokenizer((checkpoint.path / "tokenizer.json").read_text(), n_vocab=size)
        assert any("[PAD]" in note for note in checkpoint.notes) == (size == 258)


def test_a_gap_before_a_declared_token_stays(tmp_path: Path) -> None:
    """transformers would number the token 258, where the model has learnt nothing."""
    declared = {"added_tokens_decoder": {"280": entry(CONTROL[1])}, "eos_token": CONTROL[1]}
    checkpoint, text = opened(write(tmp_path / "model", side_files({"tokenizer_config.json": declared})))
    assert text.encode(f"a{CONTROL[1]}", add_special_tokens=False)[-1] == 280 == checkpoint.eos_token_ids[0]
    assert text.encode("<s></s>", add_special_tokens=False) == [256, 257]


def test_an_id_that_cannot_be_given_is_refused(tmp_path: Path) -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.decoder = decoders.Metaspace()
    files = {"tokenizer.json": unigram.to_str(), "tokenizer_config.json": {"added_tokens_decoder": {"9": entry("<x>")}}}
    with pytest.raises(StartError) as caught:
        opened(write(tmp_path / "model", files))
    assert "<x> is declared to have the id 9" in caught.value.why


@pytest.mark.parametrize("wanted", [False, None, True])
@pytest.mark.parametrize("begins", [False, True])
def test_what_is_put_around_a_text_is_decided_by_tokenizer_json(
    wanted: bool | None, begins: bool, tmp_path: Path
) -> None:
    """As in transformers 5, whatever ``add_bos_token`` says."""
    tokenizer = bytes_tokenizer("<s>", "</s>")
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 256)])
    settings = FAST | {"bos_token": "<s>"} | ({} if wanted is None else {"add_bos_token": wanted})
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": settings}
    path = write(tmp_path / "model", files)
    checkpoint, text = opened(path)
    assert checkpoint.path == path and (text.encode("a")[0] == 256) == begins
    check_equal(text, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_tokenizer_json_is_used_as_it_is(kind: str, tmp_path: Path) -> None:
    files = {"tokenizer.json": KINDS[kind]().to_str(), "tokenizer_config.json": FAST}
    path = write(tmp_path / "model", files | {"config.json": {"vocab_size": 1000}})
    checkpoint, text = opened(path)
    assert checkpoint.path == path and checkpoint.source is None and not checkpoint.notes
    check_equal(text, path)


def test_a_directory_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    files, ids = SIDE["added_tokens_decoder"]
    _, text = opened(write(tmp_path / "model", side_files(files)))
    assert {each: text.tokenizer.token_to_id(each) for each in ids} == ids


def test_opening_a_completed_tokenizer_imports_no_torch(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "model", side_files(SIDE["added_tokens_decoder"][0]))
    code = (
        "import sys\n"
        "from common.checkpoint.files import open_checkpoint\n"
        f"open_checkpoint({str(path)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert AddedToken  # the library itself may be imported
