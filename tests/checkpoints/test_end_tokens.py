"""A chat ends where the model ends its turn, whichever file of the checkpoint names that token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.checkpoint.files import open_checkpoint
from tests.checkpoints.makers import VOCAB, bytes_tokenizer, write
from tests.e2e.spawner import Spawner
from tests.e2e.system import RunningSystem, TandemProcess
from tests.models import EOS, SPECIALS, make_model, make_tokenizer

TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "</s>", "[|done|]"),
    "</think>",
)
ID = {text: 256 + at for at, text in enumerate(TOKENS)}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ROLES = "{% for m in messages %}[|{{ m.role }}|]{{ m.content }}[|done|]{% endfor %}"
BETWEEN = "{% for m in messages %}<|im_start|>{{ m.content }}{% if not loop.last %}[|done|]{% endif %}{% endfor %}"
PARTS = "{% for m in messages %}{{ m.content[0].text }}</think>[|done|]{% endfor %}"
BARE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
USER_ONLY = "{% for m in messages %}{{ m.content if m.role == 'user' else raise_exception('no') }}[|done|]{% endfor %}"
HARMONY = "<|start|>{{ messages }}<|end|><|return|><|call|>"
WHOLE = {"tokenizer.json": bytes_tokenizer(*TOKENS).to_str()}


def eos(value: Any) -> dict[str, Any]:
    return {"eos_token_id": value}


CASES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    # files -> (token, where it is declared)
    "tokenizer only": (
        {"config.json": eos(ID["<|endoftext|>"]), "tokenizer_config.json": {"eos_token": "<|im_end|>"}},
        [("<|endoftext|>", "config.json"), ("<|im_end|>", "tokenizer_config.json")],
    ),
    "nothing but the tokenizer": (
        {"tokenizer_config.json": {"eos_token": {"content": "</s>"}}},
        [("</s>", "tokenizer_config.json")],
    ),
    "special_tokens_map": (
        {"special_tokens_map.json": {"eos_token": "</s>"}, "tokenizer_config.json": {}},
        [("</s>", "special_tokens_map.json")],
    ),
    "template file": (
        {"generation_config.json": eos(ID["</s>"]), "chat_template.jinja": CHATML},
        [("</s>", "generation_config.json"), ("<|im_end|>", "chat template")],
    ),
    "template in the settings": (
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": CHATML}], "eos_token": "</s>"}},
        [("</s>", "tokenizer_config.json"), ("<|im_end|>", "chat template")],
    ),
    "a list is complete": (
        {"generation_config.json": eos([ID["</s>"], ID["<|endoftext|>"]]), "chat_template.jinja": CHATML},
        [("</s>", "generation_config.json"), ("<|endoftext|>", "generation_config.json")],
    ),
    "generation_config over config": (
        {"config.json": eos(ID["</s>"]), "generation_config.json": eos(ID["<|im_end|>"])},
        [("<|im_end|>", "generation_config.json")],
    ),
    "generation_config names none": (
        {"config.json": eos(ID["</s>"]), "generation_config.json": eos(None)},
        [("</s>", "config.json")],
    ),
    "nested configuration": (
        {"config.json": {"text_config": {"vocab_size": VOCAB, **eos(ID["</s>"])}}},
        [("</s>", "config.json")],
    ),
    "harmony": (
        {"generation_config.json": eos(ID["<|return|>"]), "chat_template.jinja": HARMONY},
        [("<|return|>", "generation_config.json"), ("<|call|>", "chat template")],
    ),
    **{
        f"written after an answer: {name}": (
            {"config.json": eos(ID["<|endoftext|>"]), "chat_template.jinja": template},
            [("<|endoftext|>", "config.json"), (text, "chat template")],
        )
        for name, template, text in (
            ("of no known spelling", ROLES, "[|done|]"),
            ("unless it is the last", BETWEEN, "[|done|]"),
            ("contents in parts", PARTS, "[|done|]"),
            ("without eos_token", BARE, "</s>"),
        )
    },
    "a template that refuses answers": (
        {"config.json": eos(ID["</s>"]), "chat_template.jinja": USER_ONLY},
        [("</s>", "config.json")],
    ),
    "no template": ({"generation_config.json": eos(ID["</s>"])}, [("</s>", "generation_config.json")]),
    "a word is none": ({"tokenizer_config.json": {"eos_token": "."}}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_that_end_a_sequence_and_why(case: str, tmp_path: Path) -> None:
    files, expected = CASES[case]
    found = open_checkpoint(str(write(tmp_path, WHOLE | files)))
    assert [(token.text, token.why) for token in found.end_tokens] == expected
    assert found.eos_token_ids == tuple(ID[text] for text, _ in expected)
    said = found.remarks()[0]
    assert all(f"{text} ({ID[text]}, {why})" in said for text, why in expected)
    assert expected or "none" in said


def test_a_token_outside_the_vocabulary_is_dropped_and_said(tmp_path: Path) -> None:
    found = open_checkpoint(str(write(tmp_path, WHOLE | {"generation_config.json": eos([VOCAB, ID["</s>"]])})))
    assert found.eos_token_ids == (ID["</s>"],)
    assert any(str(VOCAB) in note and "ignored" in note for note in found.notes)


@pytest.mark.parametrize("template", [CHATML, ROLES])
def test_a_token_of_the_template_outside_the_vocabulary_is_dropped_and_said(template: str, tmp_path: Path) -> None:
    config = {"vocab_size": ID["<|im_end|>"], **eos(ID["<|endoftext|>"])}
    found = open_checkpoint(str(write(tmp_path, WHOLE | {"config.json": config, "chat_template.jinja": template})))
    assert found.eos_token_ids == (ID["<|endoftext|>"],)


@pytest.mark.parametrize(
    "long", ["{{ 'x' * 10**10 }}", "{{ 'x'.ljust(10**10) }}", "{{ 'x'|center(10**10) }}", "{{ [1] * 10**10 }}"]
)
def test_a_template_that_prints_too_much_is_given_up(long: str, tmp_path: Path) -> None:
    files = {"config.json": eos(ID["</s>"]), "chat_template.jinja": ROLES.replace("{{ m.content }}", f"{long}")}
    assert open_checkpoint(str(write(tmp_path, WHOLE | files))).eos_token_ids == (ID["</s>"],)


def test_tokens_are_found_in_a_tokenizer_of_any_layout(tmp_path: Path) -> None:
    """The list of added tokens may come last, and the end token may be in the vocabulary only."""
    settings = json.loads(WHOLE["tokenizer.json"])
    added = settings.pop("added_tokens")
    settings["model"]["vocab"] |= {'"added_tokens"': 290, "<eos>": 291}
    declared = {"tokenizer_config.json": {"eos_token": "<eos>"}, "chat_template.jinja": CHATML}
    found = open_checkpoint(str(write(tmp_path, {"tokenizer.json": settings | {"added_tokens": added}} | declared)))
    assert found.eos_token_ids == (291, ID["<|im_end|>"])


@pytest.mark.e2e
@pytest.mark.parametrize("where", ["tokenizer", "template"])
async def test_a_chat_ends_with_the_turn(where: str, tmp_path: Path, one_spawner: Spawner) -> None:
    """The model writes its third token, which only the tokenizer or only the template names as the end."""
    end = SPECIALS.index("<|end|>")
    model = make_model("llama-untied", tmp_path / "model")
    prompt = make_tokenizer().apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    ids = prompt if isinstance(prompt, list) else prompt["input_ids"]
    wanted = _greedy(model, ids, 3)
    weights = load_file(model / "model.safetensors")
    rows = weights["lm_head.weight"]
    rows[[wanted[-1], end]] = rows[[end, wanted[-1]]].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    if where == "tokenizer":
        settings = json.loads((model / "tokenizer_config.json").read_text()) | {"eos_token": "<|end|>"}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        template = (model / "chat_template.jinja").read_text().replace("<|end|>", "{{ eos_token }}")
        (model / "chat_template.jinja").write_text(template)
    TandemProcess.spawner = one_spawner
    try:
        with RunningSystem.up(tmp_path, model, "--prefill", "1", "--decode", "1") as system:
            assert "end tokens: <|eos|> (1, generation_config.json), <|end|> (7, " in system.process.text
            async with system.client() as client:
                answer = await client.chat("hello", temperature=0, max_tokens=20)
    finally:
        TandemProcess.spawner = None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage["completion_tokens"] == 3


def _greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(loaded(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
