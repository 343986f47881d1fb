"""``tandem inspect``: prints what a model is, needs, and how fast it will be, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

from common.builtin import NAME, path, smollm2
from common.checkpoint.preview import preview
from common.config.inspect import InspectConfig
from common.core.errors import StartError
from common.core.printable import printable
from common.kv.budget import human_bytes
from deploy.launcher.inspection import Inspection, Memory, inspect
from deploy.launcher.preflight import PROCESS_BYTES


def run(config: InspectConfig) -> int:
    """Print the answer. Raises StartError if the model cannot be opened or served; with ``--json`` that is an object
    with ``served`` false, and exit code 1."""
    try:
        opened = preview(smollm2.resolved(config.model) or str(path()), config.revision, config.trust_remote_code)
        found = inspect(opened, config.max_model_len)
    except StartError as error:
        if not config.json:
            raise
        print(json.dumps({"served": False, "error": error.what, "why": error.why, "do": error.todo}))
        return 1
    found = replace(found, model=config.model or NAME)
    if config.json:
        print(json.dumps({"served": True, **asdict(found)}))
        return 0
    for line in lines(found):
        print(printable(line))
    return 0


def lines(found: Inspection) -> Iterator[str]:
    """Yield the lines of the answer."""
    rows = list(_rows(found))
    width = max(len(name) for name, _ in rows)
    for name, texts in rows:
        for at, text in enumerate(texts):
            yield f"{'' if at else name:<{width}}  {text}"


def _rows(found: Inspection) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each fact, and its lines of text."""
    used = f", of which a token uses {_billions(found.active_parameters)}"
    more = used if found.active_parameters < found.parameters else ""
    stored = ", ".join(f"{count} of {kind}" for kind, count in found.tensors.items())
    where = "" if found.downloaded else ", not downloaded"
    yield "model", [found.model]
    yield "architecture", [f"{found.architecture} ({found.model_type})"]
    yield "parameters", [f"{_billions(found.parameters)}{more}"]
    yield "weights", [f"{found.format}, {human_bytes(found.file_bytes)}{where}; tensors: {stored}"]
    yield "computed", [f"in {found.dtype} on {found.device}: {found.dtype_reason}"]
    limit = f"; {found.scaling} with --max-model-len" if found.scaling else ""
    yield "context", [f"{found.context:,} tokens{limit}"]
    yield "memory", list(_memory(found))
    ends = [f"{each.text or 'token'}  {each.id}, from {each.why}" for each in found.end_tokens]
    yield "end tokens", ends or ["none: answers run to their limit of tokens"]
    yield "vocabulary", [f"{found.vocabulary:,} tokens"]
    yield "chat template", [", ".join(found.chat_templates) or "none: /v1/chat/completions is refused"]
    yield "tool calls", [found.tool_calls or "not read: no known format in the template"]
    yield "reasoning", [found.reasoning or "not separated: no known format in the template"]
    for name, texts in (("fast", found.fast), ("slow", found.slow), ("notes", found.notes)):
        if texts:
            yield name, list(texts)


def _memory(found: Inspection) -> Iterator[str]:
    """Yield the memory of a worker as text and as a table, contexts down and numbers of requests across."""
    if found.kv_bytes_per_token is None:
        yield f"{human_bytes(found.weight_bytes)} of weights; KV is known once the model is loaded"
        return
    per_token = human_bytes(found.kv_bytes_per_token)
    weights, process = human_bytes(found.weight_bytes), human_bytes(PROCESS_BYTES)
    yield f"of each worker: {weights} of weights, {per_token} of KV per token, {process} besides"
    yield from _table(found.memory)
    if found.weight_bytes > found.free_bytes:
        yield f"too little here: {human_bytes(found.free_bytes)} are free on {found.device}"
    else:
        yield f"free on {found.device}: {human_bytes(found.free_bytes)}"


def _table(memory: Iterable[Memory]) -> Iterator[str]:
    rows = dict[int, dict[int, str]]()
    for each in memory:
        rows.setdefault(each.tokens, {})[each.requests] = human_bytes(each.bytes)
    batches = next(iter(rows.values()))
    heads = [f"{count} request{'' if count == 1 else 's'}" for count in batches]
    yield "  ".join(["tokens".rjust(9), *(head.rjust(12) for head in heads)])
    for tokens, cells in rows.items():
        yield "  ".join([f"{tokens:,}".rjust(9), *(cell.rjust(12) for cell in cells.values())])


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
