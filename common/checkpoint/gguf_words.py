"""How byte-level tokenizers of GGUF files split text into words before merges: by ``tokenizer.ggml.pre``.

A file names its pre-tokenizer and leaves the patterns to its reader. These are the patterns of the models' own
tokenizers. Several patterns apply one after the other, each inside the pieces of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping

_APOSTROPHES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_APOSTROPHES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_APOSTROPHES}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
SEED_CODER = rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_NAMES: Mapping[tuple[str, ...], str] = {
    (GPT2,): "gpt-2 phi-2 olmo mpt jais exaone4 trillion granite-docling roberta-bpe gigachat",
    (r"\p{N}", GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
    "glm4 chatglm-bpe",
    (QWEN2,): "qwen2 stablelm2 deepseek-r1-qwen megrez hunyuan grok-2 solar-open kormo f2llmv2",
    (QWEN35,): "qwen35",
    (TEKKEN,): "tekken",
    (GPT4O,): "gpt-4o llama4 kanana2 minimax-m2 talkie",
    DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
    DEEPSEEK_CODER: "deepseek-coder",
    FALCON: "falcon",
    (BLOOM,): "poro-chat bloom gpt3-finnish",
    (BLOOM, r"\p{N}"): "viking",
    (SEED_CODER,): "seed-coder",
    (BAILING,): "bailingmoe bailingmoe2 llada-moe",
    DEFAULT: "default",
}  # fmt: skip
PATTERNS: Mapping[str, tuple[str, ...]] = {
    name: patterns for patterns, names in _NAMES.items() for name in names.split()
}
"""The patterns of each pre-tokenizer."""
IGNORE_MERGES = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split()
)
"""Those under which a word that is a token needs no merges."""
BEGIN = IGNORE_MERGES - {"falcon3", "falcon-h1"}
"""Those under which a text begins with the token for that, unless the file says otherwise."""
