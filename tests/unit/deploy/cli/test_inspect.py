"""``tandem inspect`` says what a model is and needs from its files alone, and fails for what cannot be served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.files import open_checkpoint
from common.checkpoint.preview import Preview, preview
from common.config.up import UpConfig
from common.core.errors import StartError
from deploy.cli import inspect as command
from deploy.cli.main import main
from deploy.launcher import inspection
from deploy.launcher.gpus import Place
from deploy.launcher.preflight import PROCESS_BYTES, check_memory
from tests.checkpoints.makers import bytes_tokenizer, write

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, POSITIONS = 64, 3, 4, 2, 300, 40_000
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 16,
    "max_position_embeddings": POSITIONS, "vocab_size": VOCAB,
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (HEADS * 16, HIDDEN), "self_attn.k_proj": (KV_HEADS * 16, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * 16, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * 16),
    "mlp.gate_proj": (128, HIDDEN), "mlp.up_proj": (128, HIDDEN), "mlp.down_proj": (HIDDEN, 128),
}  # fmt: skip
WEIGHTS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in MATRICES.items()},
}
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * 16 * 4
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"


def safetensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return a file of float32 zeros."""
    entries, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(at)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    files = {
        "config.json": CONFIG,
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "chat_template.jinja": TEMPLATE,
    }
    write(tmp_path, files, {})
    bytes_tokenizer("<|im_start|>", "<|im_end|>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model.safetensors").write_bytes(safetensors(WEIGHTS))
    return tmp_path


def inspected(directory: Path) -> inspection.Inspection:
    return inspection.inspect(preview(str(directory)))


def test_the_facts_of_a_model(directory: Path) -> None:
    found = inspected(directory)
    assert (found.architecture, found.model_type) == ("Qwen3ForCausalLM", "qwen3")
    assert found.parameters == found.active_parameters == sum(map(math.prod, WEIGHTS.values()))
    assert found.tensors == {"F32": len(WEIGHTS)} and found.downloaded
    assert found.dtype == "float32" and found.weight_bytes == found.file_bytes
    assert [(end.id, end.text, end.why) for end in found.end_tokens] == [(257, "<|im_end|>", "tokenizer_config.json")]
    assert found.chat_templates == ("default",) and found.context == found.longest_context == POSITIONS


def test_memory_at_each_context_and_batch(directory: Path) -> None:
    found = inspected(directory)
    assert found.kv_bytes_per_token == TOKEN_BYTES
    table = {(each.tokens, each.requests): each.bytes for each in found.memory}
    assert {tokens for tokens, _ in table} == {2_048, 8_192, 32_768, POSITIONS}
    assert {requests for _, requests in table} == {1, 8, 32}
    for (tokens, requests), total in table.items():
        assert total == found.weight_bytes + requests * tokens * TOKEN_BYTES + PROCESS_BYTES


@pytest.mark.parametrize(("own", "asked"), [(POSITIONS, 8), (POSITIONS, 31), (POSITIONS, POSITIONS + 1), (8, None)])
def test_a_context_out_of_range_is_refused_as_by_up(
    own: int, asked: int | None, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": own}))
    flags = [] if asked is None else ["--max-model-len", str(asked)]
    assert main(["inspect", str(directory), *flags]) == 1
    said = capsys.readouterr().err
    with pytest.raises(StartError) as caught:
        check_memory(open_checkpoint(str(directory)), UpConfig(model=str(directory), max_model_len=asked), 1, [Place()])
    assert f"cannot serve {asked or own:,} tokens of context" in said
    assert caught.value.what in said and caught.value.why in said and caught.value.todo in said


def test_memory_up_to_a_context_of_choice(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory), "--max-model-len", "3000", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["context"] == 3000 and answer["longest_context"] == POSITIONS
    assert {each["tokens"] for each in answer["memory"]} == {2048, 3000}


def test_scaled_context(directory: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}}
    (directory / "config.json").write_text(json.dumps(CONFIG | scaling))
    found = inspected(directory)
    assert (found.context, found.longest_context) == (POSITIONS, 4 * POSITIONS)
    assert any("160,000 with --max-model-len" in line for line in command.lines(found))


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (TEMPLATE, None, None),
        (TEMPLATE + '<tool_call>\n{"name": </tool_call>', "hermes", None),
        (TEMPLATE + "{% if enable_thinking %}<think>\n\n</think>{% endif %}", None, "qwen3"),
    ],
)
def test_formats_of_tools_and_reasoning(
    template: str, tools: str | None, reasoning: str | None, directory: Path
) -> None:
    (directory / "chat_template.jinja").write_text(template)
    found = inspected(directory)
    assert (found.tool_calls, found.reasoning) == (tools, reasoning)


def test_what_is_fast_and_what_is_not(directory: Path) -> None:
    fused = inspected(directory)
    assert any("all in one call" in each for each in fused.fast) and not fused.slow
    names = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    (directory / "config.json").write_text(json.dumps(CONFIG | names))
    other = inspected(directory)
    assert not any("in one call" in each for each in other.fast) and any("modules of" in each for each in other.slow)


def test_a_model_that_is_not_served(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"architectures": None, "model_type": "jamba"}))
    assert main(["inspect", str(directory)]) == 1
    said = capsys.readouterr()
    assert not said.out and "why: JambaForCausalLM has layers with a recurrent state" in said.err
    assert main(["inspect", str(directory), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["served"] is False and "recurrent state" in answer["why"] and answer["do"]


def test_a_template_that_cannot_be_used(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(StartError, match="template"):
        inspected(directory)


def test_json_has_all_facts(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = inspected(directory)
    assert answer["served"] is True and answer["parameters"] == found.parameters
    assert answer["end_tokens"] == [{"id": 257, "text": "<|im_end|>", "why": "tokenizer_config.json"}]
    assert answer["memory"][0] == {"tokens": 2048, "requests": 1, "bytes": found.memory[0].bytes}


def test_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    said = capsys.readouterr().out
    for words in ("tandem-builtin", "LlamaForCausalLM (llama)", "2,048 tokens", "<|end|>  7, from", "hermes"):
        assert words in said


def test_without_the_shape_of_kv_memory_is_that_of_weights(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"kv_lora_rank": 8}))
    found = inspected(directory)
    assert found.kv_bytes_per_token is None and not found.memory
    assert any("KV is known once the model is loaded" in line for line in command.lines(found))


def test_a_preview_of_a_directory_is_local(directory: Path) -> None:
    found: Preview = preview(str(directory))
    assert found.local and found.checkpoint.fingerprint and set(found.tensors) == set(WEIGHTS)
