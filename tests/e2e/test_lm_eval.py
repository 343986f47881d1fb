"""lm-eval's ``local-completions`` gets transformers' log-likelihoods from ``tandem up``: those of its model ``hf``.

The tasks have the shapes of hellaswag (endings of a text), of MMLU (letters behind a question) and of WikiText
(perplexity of whole texts), over local files. lm-eval is installed by ``make lm-eval`` in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common import builtin
from tests.e2e.system import ROOT, RunningSystem
from tests.e2e.test_tokens import ONE_ONE
from tests.pace import scaled

LM_EVAL = ROOT / ".cache" / "lm-eval" / "bin" / "python"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.whole,
    pytest.mark.skipif(not LM_EVAL.exists(), reason="lm-eval is not installed: make lm-eval"),
]
TOLERANCE = 1e-4
_CHOICES = """\
dataset_path: json
dataset_kwargs: {data_files: {test: "FILE"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
_TEXTS = """\
dataset_path: json
dataset_kwargs: {data_files: {test: "FILE"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
_ENDINGS = [
    ("A man sits down at the piano. He", ["plays a slow song.", "eats the keys.", "is a bridge.", "flies north."], 0),
    ("The children run into the garden and", ["close the sun.", "start to play.", "boil a car.", "are seven."], 1),
    ("She opens the book, and then she", ["barks twice.", "rains.", "reads the first page.", "melts."], 2),
    ("To make tea, first you", ["sell a house.", "sing.", "paint the moon.", "boil some water."], 3),
    ("Größe und naïve cafés 你好: the text goes on with", ["words.", "Wörter.", "言葉.", "🙂."], 0),
]
_QUESTIONS = [
    ("What is 2 + 2?\nA. 3\nB. 4\nC. 5\nD. 22\nAnswer:", 1),
    ("Which is a colour?\nA. red\nB. run\nC. rain\nD. ride\nAnswer:", 0),
    ("What is the capital of France?\nA. Rome\nB. Oslo\nC. Paris\nD. Bern\nAnswer:", 2),
    (("word " * 400) + "\nHow often was that?\nA. never\nB. once\nC. twice\nD. often\nAnswer:", 3),
]


def write_tasks(directory: Path) -> None:
    documents: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "endings": (_CHOICES, [{"query": q, "choices": [f" {c}" for c in cs], "label": at} for q, cs, at in _ENDINGS]),
        "letters": (_CHOICES, [{"query": q, "choices": [" A", " B", " C", " D"], "label": at} for q, at in _QUESTIONS]),
        "texts": (_TEXTS, [{"text": query + " and so on" * 30} for query, *_ in (*_ENDINGS, *_QUESTIONS)]),
    }
    for name, (task, lines) in documents.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (directory / f"{name}.yaml").write_text(f"task: {name}\n" + task.replace("FILE", str(file)))


def numbers_of(value: Any) -> list[float]:
    """Return all log-likelihoods in lm-eval's responses, which are nested lists of [log-likelihood, is_greedy]."""
    if isinstance(value, list):
        return [number for each in value for number in numbers_of(each)]
    return [{"True": 1.0, "False": 0.0}.get(str(value), value) if isinstance(value, bool | str) else value]


@pytest.mark.timeout(scaled(400))
def test_the_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    model, tasks, out = builtin.path(), tmp_path / "tasks", tmp_path / "out.json"
    tasks.mkdir()
    write_tasks(tasks)
    small = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "600")
    with RunningSystem.up(tmp_path, model, *ONE_ONE, small=small) as system:
        served = f"model={system.name},base_url={system.url}/v1/completions,tokenizer_backend=huggingface,"
        served += f"tokenizer={model},max_length=2048,eos_string=<|im_end|>"
        models = [f"hf=pretrained={model},dtype=float32,device=cpu,max_length=2048,add_bos_token=True"]
        models += [f"local-completions={served},add_bos_token=True,num_concurrent=4"]
        models += [f"local-completions={served},tokenized_requests=False"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        environment.pop("PYTHONPATH", None)
        client = Path(__file__).with_name("lm_eval_client.py")
        ended = subprocess.run(
            [LM_EVAL, client, tasks, out, *models],
            capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=scaled(300), check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    hf, by_ids, by_text = json.loads(out.read_text()).values()
    for name in hf:
        compare(name, hf[name], by_ids[name])
    # prompts as text begin with the server's own token, of which lm-eval's lengths of contexts know nothing
    compare("texts", hf["texts"], by_text["texts"])


def compare(name: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Check that two runs of task ``name`` have the same log-likelihoods, greediness and metrics. A log-likelihood is a
    sum over tokens: its difference per token is bounded where a text has more than a hundred."""
    numbers, got = numbers_of(expected["responses"]), numbers_of(found["responses"])
    assert len(numbers) == len(got) > 4
    for one, other in zip(numbers, got, strict=True):
        assert abs(one - other) < TOLERANCE * max(1.0, abs(one) / 100), f"{name}: {other} is not {one}"
    for metric, value in expected["results"].items():
        if isinstance(value, float):
            assert abs(found["results"][metric] - value) < TOLERANCE, (name, metric)
