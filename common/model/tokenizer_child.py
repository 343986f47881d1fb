"""The child process that converts a tokenizer to tokenizer.json with transformers.

    python -m common.model.tokenizer_child SOURCE TARGET [trust]

Its last line of output is a JSON object: ``named``, the special tokens by name, or ``error``, why it failed.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from pathlib import Path
from typing import Any

from common.checkpoint.side_tokens import within


def main(source: Path, target: Path, trust: bool) -> dict[str, Any]:
    """Write tokenizer.json to ``target`` and return the answer. ``trust``: whether code of ``source`` may run."""
    from transformers import AutoTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    TikTokenConverter.load_tiktoken_bpe = staticmethod(read_ranks)  # type: ignore[method-assign, assignment]
    if not trust and any(source.glob("*.tiktoken")):
        return {"error": "how a tiktoken file splits words is only in the checkpoint's Python code: if you trust it, "
                "give --trust-remote-code"}  # fmt: skip
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust, local_files_only=True)
    except Exception as error:  # tokenizer code may raise anything
        return {"error": f"transformers says {type(error).__name__}: {' '.join(str(error).split())}"}
    backend = getattr(tokenizer, "backend_tokenizer", None) or _of_ranks(tokenizer, source)
    if backend is None:
        return {"error": f"{type(tokenizer).__name__} is written in Python and has no equivalent in tokenizers"}
    wanted = _vocab_size(source)
    if wanted is not None and (size := backend.get_vocab_size()) < wanted // 2:
        # transformers makes an empty one where it finds no files that it knows
        return {"error": f"the result has {size:,} tokens, but the model {wanted:,}"}
    (target / "tokenizer.json").write_text(within(json.loads(backend.to_str()), wanted), encoding="utf-8")
    named = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    return {"named": named}


def read_ranks(file: str) -> dict[bytes, int]:
    """Read a tiktoken file: lines of a token in base64 and its rank. Raises ValueError if it is something else."""
    ranks = {}
    for line in Path(file).read_bytes().splitlines():
        if line:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise ValueError(f"{Path(file).name} is no tiktoken file") from None
    return ranks


def _of_ranks(tokenizer: Any, source: Path) -> Any:
    """Return the equivalent of a Python tokenizer over a tiktoken file, whose code has the pattern of words as
    ``pat_str`` or ``PAT_STR`` and its special tokens by text; None for any other one."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    files = [*sorted(source.glob("*.tiktoken")), *source.glob("tiktoken.model")]
    module = sys.modules[type(tokenizer).__module__]
    pattern = getattr(tokenizer, "pat_str", None) or getattr(module, "PAT_STR", None)
    special = getattr(tokenizer, "special_tokens", None)
    if not files or not isinstance(pattern, str) or not isinstance(special, dict):
        return None
    texts = sorted(special, key=special.__getitem__)
    backend = TikTokenConverter(str(files[0]), pattern=pattern, extra_special_tokens=texts).converted()
    return backend if all(backend.token_to_id(text) == special[text] for text in texts) else None


def _vocab_size(source: Path) -> int | None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    size = text.get("vocab_size")
    return size if isinstance(size, int) else None


if __name__ == "__main__":
    try:
        answer = main(Path(sys.argv[1]), Path(sys.argv[2]), "trust" in sys.argv[3:])
    except (OSError, ValueError) as failed:
        answer = {"error": str(failed)}
    print(json.dumps(answer), flush=True)
