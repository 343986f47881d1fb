"""Compare the tokens of one prefill and one decode worker on one card with those of the model."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch

from bench.goals.checkpoint import save_tokenizer
from bench.goals.figures import GoalTarget, Row
from bench.gpu.shapes import make
from bench.gpu.stages import Setting
from bench.load.systems import READY_S, running
from common.core.errors import StartError
from common.net.http_client import HttpClient

PROMPTS, TOKENS = (37, 300, 1500, 4000), 32
"""Prompt lengths and output tokens."""
ON_GPU_S = 90.0
"""Longest start of a system on a GPU: less than half of the stage's limit, so that its last words are shown."""
LARGEST_GAP = 0.15
"""Largest accepted distance of a token's logit from the best, in standard deviations of the row's logits: what the
rounding of bfloat16 allows."""


def compare(setting: Setting) -> list[Row]:
    """Ask both models, then compare every token with transformers' logits after the same tokens. Raises StartError if a
    request was not handed off."""
    rows = []
    for shape in (setting.small, setting.large):
        path = make(shape, setting.folder, torch.device(setting.device))
        save_tokenizer(path)
        draw = random.Random(0)
        lengths = [max(8, length // 16) for length in PROMPTS] if setting.dry else PROMPTS
        prompts = [[draw.randrange(3, shape.vocabulary) for _ in range(length)] for length in lengths]
        answers, ways = _answers(setting, path, prompts)
        gap = _worst_gap(setting, path, prompts, answers)
        rows.append(
            Row(
                "",
                f"1P1D on one device, {shape.name}: largest distance of a token's logit from the best",
                "σ",
                gap,
                (GoalTarget("value", LARGEST_GAP, LARGEST_GAP, at_most=True),),
                note=f"KV came by {', '.join(ways)}",
            )
        )
    return rows


def _answers(setting: Setting, path: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[str]]:
    """Return the tokens of each prompt's answer, and the links by which KV was handed off."""
    flags = ["--max-model-len", "8192"] if not setting.dry else ["--dtype", "float32"]
    flags += ["--device", "cpu" if setting.dry else "cuda", "--local-prefill", "never"]
    with running(str(path), "1p1d", flags, ready_s=READY_S if setting.dry else ON_GPU_S) as url:
        server, answers = HttpClient(url, timeout_s=120), []
        for prompt in prompts:
            body = {
                "model": server.model(), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "return_metrics": True,
            }  # fmt: skip
            answer = server.post("/v1/completions", body)
            if answer["tandem"]["path"] != "disagg":
                raise StartError(
                    "a request was not handed off", f"its path is {answer['tandem']['path']}", "see the log"
                )
            answers.append(answer["choices"][0]["token_ids"])
        return answers, _links(server)


def _links(server: HttpClient) -> list[str]:
    """Return the links over which KV has come, from the server's metrics."""
    text = server.read("/metrics")[1].decode()
    counted = re.findall(r'^tandem_kv_transfer_bytes_total{transport="([^"]*)"} (\S+)$', text, re.MULTILINE)
    return sorted(link for link, count in counted if float(count))


@torch.inference_mode()
def _worst_gap(setting: Setting, path: Path, prompts: list[list[int]], answers: list[list[int]]) -> float:
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if setting.dry else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to(setting.device)
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer[:-1]], device=setting.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
        chosen = logits.gather(1, torch.tensor(answer, device=setting.device)[:, None]).squeeze(1)
        worst = max(worst, float(((logits.amax(dim=-1) - chosen) / logits.std(dim=-1)).max()))
    return worst
