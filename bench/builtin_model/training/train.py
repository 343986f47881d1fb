"""The training loop: Muon for matrices, AdamW for the rest, a cosine schedule, checkpoints to resume from.

On CPUs, threads compute whole pieces of a batch, so that a core that is busy elsewhere delays only the end of a step.
Gradients are added in the order of the pieces, which makes the sum independent of the threads.

With a teacher, the loss mixes the cross-entropy of the true tokens with the divergence from the teacher's distribution.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import LlamaForCausalLM

from bench.builtin_model.training.data import Batches, PaddedRows
from bench.builtin_model.training.recipe import Recipe
from bench.builtin_model.training.tokenizer import Encoder

SAVE_EVERY = 100
Look = Callable[[LlamaForCausalLM, int], dict[str, float]]


def train(
    recipe: Recipe,
    encoder: Encoder,
    room: Path,
    *,
    teacher: LlamaForCausalLM | None = None,
    look: Look | None = None,
    look_every: int = 500,
    stop_at: int | None = None,
    threads: int = 1,
) -> LlamaForCausalLM:
    """Train to the end of the recipe or to step ``stop_at``, resuming from ``room/state.pt`` if it exists.

    ``look`` evaluates the model every ``look_every`` steps and at the end."""
    room.mkdir(parents=True, exist_ok=True)
    run = TrainingRun(recipe, encoder, room, teacher, threads)
    last = recipe.steps if stop_at is None else min(stop_at, recipe.steps)
    with _bar() as bar:
        task = bar.add_task(room.name, total=last, completed=run.step, loss=math.nan, rate=0)
        while run.step < last:
            loss, rate = run.advance()
            bar.update(task, completed=run.step, loss=loss, rate=int(rate))
            if look and (run.step % look_every == 0 or run.step == last):
                found = look(run.model, run.step)
                run.note(found)
                shown = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
                bar.console.print(f"step {run.step}: {shown}", highlight=False)
            if run.step % SAVE_EVERY == 0 or run.step == last:
                run.save()
                bar.console.print(f"step {run.step}: loss {run.recent():.4f}, {int(rate)} tokens/s", highlight=False)
    run.close()
    return run.model


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}"), TextColumn("{task.fields[rate]} tokens/s"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip


class TrainingRun:
    """The state of one training run: model, optimizers, step, history."""

    def __init__(
        self, recipe: Recipe, encoder: Encoder, room: Path, teacher: LlamaForCausalLM | None = None, threads: int = 1
    ) -> None:
        torch.manual_seed(recipe.seed)
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(threads)
        self.recipe, self.room, self.teacher = recipe, room, teacher
        self.model = LlamaForCausalLM(recipe.config(encoder.bos, encoder.stop, encoder.pad))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.nn.Module.to(self.model, self._device)
        if teacher is not None:
            torch.nn.Module.to(teacher, self._device)
            teacher.train(False)
        self._optimizers = _optimizers(self.model, recipe)
        self._batches = Batches(encoder, recipe)
        self.step, self._history = 0, list[dict[str, float]]()
        if (room / "state.pt").exists():
            self._load()

    def advance(self) -> tuple[float, float]:
        """Run one optimizer step. Returns its loss and the tokens per second."""
        began = time.perf_counter()
        pieces = self._batches[self.step]
        total = sum(float(piece.weights[:, 1:].sum()) for piece in pieces)
        self.model.train()
        loss = 0.0
        for share, gradients in self._pool.map(lambda piece: self._gradients(piece, total), pieces):
            loss += share
            for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._set_rates()
        list(self._pool.map(lambda optimizer: optimizer.step(), self._optimizers))
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self._history.append({"step": self.step, "loss": loss})
        return loss, sum(piece.ids.numel() for piece in pieces) / (time.perf_counter() - began)

    def recent(self, steps: int = SAVE_EVERY) -> float:
        """Return the mean loss of the last ``steps`` steps."""
        losses = [row["loss"] for row in self._history[-steps:] if "loss" in row]
        return sum(losses) / len(losses)

    def note(self, figures: dict[str, float]) -> None:
        """Add the results of an evaluation to the history of the current step."""
        self._history[-1] |= figures

    def save(self) -> None:
        """Write a checkpoint atomically: an interruption leaves the previous one intact."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "history": json.dumps(self._history),
        }
        torch.save(state, self.room / "state.part")
        os.replace(self.room / "state.part", self.room / "state.pt")
        lines = "".join(json.dumps(row) + "\n" for row in self._history)
        (self.room / "history.jsonl").write_text(lines, encoding="utf-8")

    def close(self) -> None:
        """End the threads. Does not save; see :meth:`save`."""
        self._batches.close()
        self._pool.shutdown()

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self.room / "state.pt", map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self._history = state["step"], json.loads(state["history"])

    def _gradients(self, piece: PaddedRows, total: float) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Return the piece's share of the batch's loss, and of the gradients."""
        loss = self._loss(piece) / total
        return loss.item(), torch.autograd.grad(loss, list(self.model.parameters()))

    def _loss(self, piece: PaddedRows) -> torch.Tensor:
        """Return the weighted loss, summed over a piece's tokens. Only rows with a weight go through the output
        layer."""
        ids, weights = piece.ids.to(self._device), piece.weights[:, 1:].to(self._device)
        wanted = weights > 0
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1][wanted]
            logits = self.model.lm_head(hidden)
        losses = functional.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
        if self.teacher is not None:
            losses = (1 - self.recipe.distil) * losses + self.recipe.distil * self._divergence(ids, wanted, logits)
        return (losses * weights[wanted]).sum()

    def _divergence(self, ids: torch.Tensor, wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert self.teacher is not None
        with torch.no_grad(), torch.autocast(self._device.type, dtype=torch.bfloat16):
            hidden = self.teacher.model(ids, use_cache=False).last_hidden_state[:, :-1][wanted]
            target = functional.log_softmax(self.teacher.lm_head(hidden).float(), dim=-1)
        guess = functional.log_softmax(logits.float(), dim=-1)
        return functional.kl_div(guess, target, log_target=True, reduction="none").sum(-1)

    def _set_rates(self) -> None:
        factor = _factor(self.step, self.recipe)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor


def _factor(step: int, recipe: Recipe) -> float:
    """Return the factor on the peak learning rate: linear warm-up, then half a cosine down to 0.01."""
    warm = max(1, round(recipe.steps * recipe.warmup))
    if step < warm:
        return (step + 1) / warm
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, recipe.steps - warm)))


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    halves = [
        torch.optim.Muon(
            [{"params": half, "peak": recipe.matrix_rate}],
            lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw",
        )
        for half in (matrices[::2], matrices[1::2])
    ]  # fmt: skip
    adam = torch.optim.AdamW(
        [{"params": others, "peak": recipe.rate}], lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    return [*halves, adam]
