"""``tandem quantize``: writes a checkpoint with its linear layers in 4 or 8 bits, with a card of what that costs."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from bench.eval.agreement import Agreement, measure
from common import builtin
from common.builtin import smollm2
from common.checkpoint.files import Checkpoint, open_checkpoint
from common.config.quantize import QuantizeConfig
from common.core.errors import StartError
from common.kv.budget import human_bytes
from common.model.load_compact import not_taken
from common.quantization.export import Progress, Written, write_rounded
from common.quantization.rounded import open_rounded

LINE_EVERY_S = 15.0
"""Time between two lines of progress where there is no terminal."""


def run(config: QuantizeConfig) -> int:
    """Write the checkpoint and its card, measure the quality, and print a summary. Returns the exit code."""
    if not config.model or not config.output:
        todo = "tandem quantize MODEL OUTPUT --bits 4"
        raise StartError("tandem quantize needs a model and a directory", "one is read, the other written", todo)
    out = Path(config.output).absolute()
    if out.exists():
        raise StartError(f"cannot write {config.output}", "it exists already", "name a new directory, or remove it")
    original = open_checkpoint(smollm2.resolved(config.model), config.revision, config.trust_remote_code)
    if original.format.method:
        is_gguf = original.format.container == "gguf"
        why = "it is a GGUF file" if is_gguf else f"its weights are quantized already, in {original.format.shown}"
        raise StartError(f"cannot quantize {config.model}", why, "serve it as it is, or name the unquantized model")
    bits: Literal[4, 8] = 4 if config.bits == "4" else 8
    kept = not_taken(original, open_rounded(original, bits), config.trust_remote_code)
    with _exit_on_termination():
        written = write_rounded(original, out, bits, int(config.group), kept, _progress(original), config.symmetric)
    _write_card(out, config, original, written, "Not measured.")
    left = f", {len(written.kept)} kept" if written.kept else ""
    print(
        f"{sum(map(len, written.rounded.values()))} matrices in {bits} bits{left}: "
        f"{human_bytes(written.before)} became {human_bytes(written.after)} in {config.output}"
    )
    if config.answers:
        quality = _quality(config, original, out)
        _write_card(out, config, original, written, quality)
        print(quality)
    return 0


@contextlib.contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Have SIGTERM raise SystemExit, so that what was begun is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress(checkpoint: Checkpoint, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a progress bar; if standard error is no terminal, a line every :data:`LINE_EVERY_S`."""
    total, began = checkpoint.weight_bytes, clock()
    if sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(desc="quantizing", total=total, unit="B", unit_scale=True)
        return lambda read: bar.update(read - bar.n)
    printed = began

    def line(read: int) -> None:
        nonlocal printed
        if (now := clock()) - printed >= LINE_EVERY_S:
            printed = now
            print(f"quantized {human_bytes(read)} of {human_bytes(total)}", file=sys.stderr, flush=True)

    return line


def _quality(config: QuantizeConfig, original: Checkpoint, out: Path) -> str:
    """Return the card's text on quality; a model that cannot be loaded for it is no error: it has been written."""
    try:
        found = measure(original, open_checkpoint(str(out), None, config.trust_remote_code), config.answers)
    except StartError as error:
        return f"Not measured: {error.what}, {error.why}."
    return quality_text(found)


def quality_text(found: Agreement) -> str:
    """Return a table of the figures, and on what they were measured."""
    how = "with the model's chat template" if found.as_chats else "as plain text, since the model has no chat template"
    return "\n".join(
        (
            "| | before | after |",
            "|---|---|---|",
            f"| perplexity | {found.before:.4f} | {found.after:.4f} ({found.change:+.2%}) |",
            f"| same most likely token | 100.00% | {found.same_token:.2%} |",
            "",
            f"On {found.tokens:,} tokens of {found.answers} reference answers, taken evenly from all skills of the",
            f"golden set in Tandem's repository (bench/eval/golden), {how};",
            "both models computed in float32, with the weights as they are stored.",
        )
    )


def _write_card(out: Path, config: QuantizeConfig, original: Checkpoint, written: Written, quality: str) -> None:
    """Write README.md."""
    zeros = "symmetric" if config.symmetric or config.bits == "8" else "with a zero per group"
    facts = [
        f"- {len(modules)} matrices in {config.bits} bits, {zeros}, in groups of {size} columns"
        for size, modules in sorted(written.rounded.items(), reverse=True)
    ]
    if written.kept:
        facts.append(
            f"- matrices kept as they are (output layer, routers, joined experts, others): {len(written.kept)}"
        )
    facts.append(f"- {human_bytes(written.before)} of weights became {human_bytes(written.after)}")
    path = Path(config.model)
    name = path.resolve().name if path.exists() else config.model
    if path.exists() and path.resolve() == builtin.path():
        name = builtin.NAME
    lines = [
        "---",
        *(() if path.exists() else (f"base_model: {config.model}",)),
        "tags:",
        "- compressed-tensors",
        "---",
        "",
        f"# {name}, quantized to {config.bits} bits",
        "",
        f"The linear layers of {name}{f', revision {original.revision},' if original.revision else ''} rounded to the",
        f"nearest without calibration by `tandem quantize` {metadata.version('tandem')}, and stored as",
        "compressed-tensors (pack-quantized). The model's own card and license apply.",
        "",
        *facts,
        "",
        "## Quality",
        "",
        quality,
        "",
        "Measure your own questions, too: `tandem eval --save` before, `tandem eval --compare` after.",
    ]
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
