"""Where the tokenizer of a checkpoint is read from: its own directory, or one with a tokenizer.json that is made from
its other files.

A tokenizer without tokenizer.json is converted by transformers, in a child process: the coordinator and the launcher do
not import it, and a converter that hangs can be killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common.checkpoint import side_tokens
from common.checkpoint.text_directory import copy_small_files, key_of, small_files, text_directory
from common.core.errors import StartError

CHILD = "common.model.tokenizer_child"
TIMEOUT_S = 300.0
"""Bound of a conversion, in seconds. It takes a few, most of them for imports."""
_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model")
_WORDS = "vocab.txt"


def readable_text(model: str, directory: Path, vocab_size: int | None, trust: bool = False) -> tuple[Path, str]:
    """Return the directory with the tokenizer of ``model``, whose files are in ``directory``, and a note if it is
    another one ("" if not). ``trust``: whether code of the checkpoint may run. Raises StartError if its tokenizer
    cannot be read. A directory without any tokenizer is returned as it is."""
    if (directory / "tokenizer.json").is_file():
        if not (words := side_tokens.missing(directory, vocab_size)):
            return directory, ""
        key = key_of("merge", str(vocab_size), files=[directory / "tokenizer.json", *small_files(directory)])
        made = text_directory(key, lambda target: _write_merged(directory, target, vocab_size))
        return made, f"tokenizer.json is used {words}"
    sources = sources_of(directory)
    if not sources:
        return directory, ""
    key = key_of(
        "convert", str(trust), version("transformers"), version("tokenizers"),
        files=[*sources, *small_files(directory), *(directory.glob("*.py") if trust else ())],
    )  # fmt: skip
    made = text_directory(key, lambda target: _convert(model, directory, target, trust))
    return made, f"there is no tokenizer.json: it is converted from {' and '.join(file.name for file in sources)}"


def sources_of(directory: Path) -> list[Path]:
    """Return the files of which a tokenizer.json can be made, [] if there are none."""
    named = [directory / name for name in _SOURCES if (directory / name).is_file()]
    pairs = [directory / name for name in ("vocab.json", "merges.txt")]
    if named:
        return named[:1]
    if all(file.is_file() for file in pairs):
        return pairs
    return [*sorted(directory.glob("*.tiktoken")), *directory.glob(_WORDS)][:1]


def _write_merged(directory: Path, target: Path, vocab_size: int | None) -> None:
    copy_small_files(directory, target)
    (target / "tokenizer.json").write_text(side_tokens.merge(directory, vocab_size), encoding="utf-8")


def _convert(model: str, directory: Path, target: Path, trust: bool) -> None:
    """Have a child process write the tokenizer to ``target``. Raises StartError if it cannot."""
    command = [sys.executable, "-m", CHILD, str(directory.absolute()), str(target), *(["trust"] if trust else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _failed(model, f"the conversion took longer than {TIMEOUT_S:.0f} seconds") from None
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        answer: Any = json.loads(last[0])
    except ValueError:
        answer = {}
    if done.returncode or not isinstance(answer, dict) or "error" in answer:
        said = answer.get("error") if isinstance(answer, dict) else None
        raise _failed(model, said or (done.stderr.strip().splitlines() or ["it ended without a reason"])[-1])
    copy_small_files(directory, target)
    settings_file = target / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    settings_file.write_text(json.dumps(answer["named"] | settings), encoding="utf-8")


def _failed(model: str, why: str) -> StartError:
    return StartError(
        f"cannot read the tokenizer of {model}",
        f"it has no tokenizer.json, and it could not be converted: {why[:300]}",
        "convert it where it can be loaded: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
    )
