"""Model types of transformers' causal language models that are refused by name, and why.

The reasons are found by the start-up check, too; here they are known before anything is downloaded.
``tests/checkpoints/architectures.py`` examines every type.
"""

from __future__ import annotations

STATE = "has layers with a recurrent state, not only attention"
INDEXER = "attends to tokens that an indexer chooses (sparse attention)"
CROSS = "is the decoder of an encoder-decoder model"
COMPRESSED = "keeps compressed keys and values beside its KV cache"
DRAFT = "drafts tokens for another model and cannot run alone"
AUDIO = "generates codes of audio, not text"
IMAGES = "reads images with attention of its own"

_TYPES = {
    STATE: (
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm2_vl lfm3 "
        "mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next "
        "qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya"
    ),
    INDEXER: (
        "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa glm5_next hy_v4 minimax_m3_vl minimax_m3_vl_text "
        "mistral_large4"
    ),
    CROSS: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper",
    COMPRESSED: "deepseek_v4",
    DRAFT: "gemma4_assistant gemma4_unified_assistant",
    AUDIO: "moshi musicgen musicgen_melody",
    IMAGES: "git mllama",
    "adds to scores a term for the distance of tokens": "inkling_text inkling2_text",
    "predicts bytes in patches of varying length": "blt",
    "computes its mask from the tokens' values (dynamic masks)": "doge",
    "calls attention twice in each layer (differential attention)": "diffllama",
    "runs its layers several times for each token": "hrm_text",
}
REFUSED_TYPES = {kind: reason for reason, kinds in _TYPES.items() for kind in kinds.split()}
"""Model type -> why it is refused, a sentence without its subject."""
