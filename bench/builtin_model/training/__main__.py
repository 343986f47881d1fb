"""``python -m bench.builtin_model.training [all | tokenizer | model | draft | figures | golden]``

Makes the files of the built-in model. ``all`` runs every step in order; an interrupted step resumes when the same
command is run again. Working files (checkpoints, histories, sample stories) are kept in ``--room``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from bench.builtin_model.corpus import SKILLS, golden, held_out, write_golden
from bench.builtin_model.corpus.items import Item
from bench.builtin_model.training import export, figures, plot
from bench.builtin_model.training.recipe import DRAFT, MODEL, Recipe
from bench.builtin_model.training.tokenizer import Encoder, save_tokenizer, train_tokenizer
from bench.builtin_model.training.train import train
from common.builtin import draft_path, path

LOOK_PER_SKILL, LOOK_EVERY = 8, 600


def main(argv: list[str] | None = None) -> int:
    """Run one step, or all."""
    options = _parser().parse_args(argv)
    steps = list(STEPS) if options.step == "all" else [options.step]
    for step in steps:
        STEPS[step](options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.builtin_model.training", description=__doc__)
    parser.add_argument("step", choices=["all", *STEPS], nargs="?", default="all")
    parser.add_argument(
        "--room", type=Path, default=Path(".cache/builtin"), help="directory of checkpoints and histories"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="number of threads")
    parser.add_argument("--out", type=Path, default=path(), help="directory to write the model to")
    parser.add_argument("--steps", type=int, help="number of training steps, for a trial")
    parser.add_argument("--stop-at", type=int, help="stop at this step; the next run resumes there")
    parser.add_argument(
        "--golden", type=Path, default=Path("bench/eval/golden/builtin.jsonl"), help="the golden set's file"
    )
    return parser


def _encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(path() / "tokenizer.json")))


def _recipe(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    return replace(recipe, steps=options.steps) if options.steps else recipe


def make_tokenizer(options: argparse.Namespace) -> None:
    """Train the tokenizer and write its files into the shipped model's directory; ``--out`` does not apply."""
    save_tokenizer(train_tokenizer(), path())


def make_golden(options: argparse.Namespace) -> None:
    """Write the golden set to ``--golden``."""
    write_golden(options.golden)


def make_model(options: argparse.Namespace) -> None:
    """Train the model, or resume its training, and write the checkpoint and its loss curve to ``--out``."""
    encoder, items = _encoder(), _few()
    model = train(
        _recipe(MODEL, options), encoder, options.room / "model", stop_at=options.stop_at, look_every=LOOK_EVERY,
        threads=options.threads,
        look=lambda model, step: figures.per_skill(figures.judged(model, encoder, items)),
    )  # fmt: skip
    export.write(model, encoder, options.out, tokenizer_from=path())
    plot.loss_curve(options.room / "model", options.out)


def make_draft(options: argparse.Namespace) -> None:
    """Train the draft model with the model in ``--out`` as its teacher, or resume that, and write its checkpoint and
    loss curve to a subdirectory of ``--out``."""
    encoder, items = _encoder(), _few()
    teacher = export.read(options.out)
    draft = train(
        _recipe(DRAFT, options), encoder, options.room / "draft", teacher=teacher, stop_at=options.stop_at,
        threads=options.threads,
        look=lambda draft, step: {"agreement": figures.agreement(teacher, draft, encoder, items)},
    )  # fmt: skip
    export.write(draft, encoder, options.out / draft_path().name, tokenizer_from=path())
    plot.loss_curve(options.room / "draft", options.out / draft_path().name)


def make_figures(options: argparse.Namespace) -> None:
    """Evaluate the exported files in bf16 on the golden set, and write the model card and the sample stories."""
    encoder = _encoder()
    model, draft, items = export.read(options.out), export.read(options.out / draft_path().name), golden()
    results = figures.judged(model, encoder, items)
    for item, text, verdict in results:
        if not verdict.right:
            print(f"{item.skill}: {item.messages[-2]['content']!r} -> {text!r}: {verdict.why}")
    found = figures.per_skill(results) | {"draft_agreement": figures.agreement(model, draft, encoder, items)}
    export.write_card(found, Counter(item.skill for item in items), model, draft, options.out)
    stories = [text for item, text, _ in results if item.skill == "stories"]
    (options.room / "stories.txt").write_text("\n\n".join(stories) + "\n", encoding="utf-8")
    for name, value in found.items():
        print(f"{name:16} {value:7.1%}")


def _few() -> list[Item]:
    """Return held-out items to evaluate during training. They differ from the golden set, which must not guide
    tuning."""
    rng = Random("look")
    return [held_out(skill, rng) for skill in SKILLS for _ in range(LOOK_PER_SKILL)]


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tokenizer": make_tokenizer,
    "golden": make_golden,
    "model": make_model,
    "draft": make_draft,
    "figures": make_figures,
}


if __name__ == "__main__":
    sys.exit(main())
