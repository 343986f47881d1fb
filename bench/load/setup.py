"""Turns the options of a load into its target, its requests and their send times; shared by all benchmark commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.load import workloads
from bench.load.arrivals import Ramp, arrivals
from bench.load.client import Target
from bench.load.tokens import FileTokenizer, ServerTokenizer, Tokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, relabelled
from common.config.bench.shared import ArrivalOptions, DatasetOptions, LoadOptions, PromptOptions, RequestOptions
from common.core.errors import StartError
from common.net.http_client import HttpClient

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Options that, if given, become fields of every request body."""
WARM = 1 << 31
"""The run number of warm-up requests; no measured run has it, so the two share no prompts."""


@dataclass(frozen=True)
class Prepared:
    """A server, the workload to send to it, and notes for the user about that workload."""

    target: Target
    workload: list[PlannedRequest]
    tokenizer: Tokenizer
    notes: list[str]
    longest: int | None = None
    """Maximum of prompt plus output tokens per request; None if nothing bounds them."""

    def asks(self, run: int = 0) -> list[PlannedRequest]:
        """Return the requests of one of several runs.

        Each run gets other tokens, so that prefix-cache entries of earlier runs cannot help it; prompts that are text
        begin with the run's number instead, except in run 0."""
        asks = relabelled(self.workload, run) if run else self.workload
        if self.target.backend == "openai-chat":
            return [_as_text(ask, self.tokenizer) for ask in asks]
        return list(asks)

    def warm(self, count: int) -> list[PlannedRequest]:
        """Return ``count`` warm-up requests to send before a run."""
        first = replace(self, workload=self.workload[:count]).asks(WARM) if count else []
        return [first[index % len(first)] for index in range(count)]


def prepare(
    options: LoadOptions,
    url: str,
    api_key: str | None = None,
    model: str | None = None,
    headers: dict[str, str] | None = None,
    longest: int | None = None,
) -> Prepared:
    """Query the server and make the requests of ``options``.

    Requests longer than ``longest`` tokens or the server's ``max_model_len`` are left out. Raises StartError if the
    server does not answer or no request is left."""
    return prepare_with(
        options, lambda tokenizer: workload(options, tokenizer), options, url, api_key, model, headers, longest
    )


def prepare_with(
    prompts: PromptOptions,
    make: Callable[[Tokenizer], Iterable[PlannedRequest]],
    requests: RequestOptions,
    url: str,
    api_key: str | None = None,
    model: str | None = None,
    headers: dict[str, str] | None = None,
    longest: int | None = None,
) -> Prepared:
    """As :func:`prepare`, with the requests that ``make`` returns for the server's tokenizer."""
    server = HttpClient(url, api_key, headers=headers)
    served = server.served(model)
    name = str(served["id"])
    tokenizer: Tokenizer = (
        FileTokenizer(Path(prompts.tokenizer)) if prompts.tokenizer else ServerTokenizer(server, name)
    )
    if isinstance(length := served.get("max_model_len"), int):
        longest = length if longest is None else min(length, longest)
    asks, left_out = workloads.within(make(tokenizer), prompts.num_prompts, longest)
    notes = []
    if left_out:
        notes.append(f"left out {left_out} requests that have no output or need more than {longest} tokens")
    if not asks:
        why = "; ".join(notes) or "the dataset has no usable requests"
        todo = "give shorter lengths, or another dataset" if notes else "give another dataset"
        raise StartError("there are no requests to send", why, todo)
    if len(asks) < prompts.num_prompts:
        notes.append(f"the dataset has {len(asks)} usable requests, fewer than --num-prompts {prompts.num_prompts}")
    sampling = {name: getattr(requests, name) for name in SAMPLING}
    extra = {name: value for name, value in sampling.items() if value is not None} | (requests.extra_body or {})
    if requests.ignore_eos:
        extra.setdefault("ignore_eos", True)
    if served.get("owned_by") == "tandem":
        extra.setdefault("return_metrics", True)
    target = Target(server.url, name, requests.backend, api_key, requests.answer_timeout, extra, headers or {})
    return Prepared(target, asks, tokenizer, notes, longest)


def times(options: ArrivalOptions, asks: Sequence[PlannedRequest], ramp: Ramp | None = None) -> list[float]:
    """Return the send time of each request in seconds after the start.

    A trace keeps its recorded times, scaled, unless a rate or a ramp is given."""
    recorded = [ask.at for ask in asks if ask.at is not None]
    if ramp is None and math.isinf(options.request_rate) and len(recorded) == len(asks):
        began = min(recorded, default=0.0)  # skipped requests at the front are not waited for
        return [(at - began) * options.time_scale for at in recorded]
    return arrivals(len(asks), options.request_rate, burstiness=options.burstiness, seed=options.seed, ramp=ramp)


def as_load(options: DatasetOptions, model: str) -> dict[str, Any]:
    """Return the options that define a load, and the model, in plain JSON types.

    Two measurements with equal results had the same load, whether the values came from flags, environment or a file.
    Numbers that are not finite become text; paths are cut to their last name."""
    names = (each.name for each in (*fields(ArrivalOptions), *fields(RequestOptions)))
    values = {name: getattr(options, name) for name in names if hasattr(options, name)} | {"model": model}
    for name in ("dataset_path", "model"):
        values[name] = values[name] and Path(values[name]).name
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
        if name not in ("save", "plot", "tokenizer")
    }


def workload(options: DatasetOptions, tokenizer: Tokenizer) -> Iterable[PlannedRequest]:
    """Return the requests of the dataset in ``options``. A trace may yield more than ``num_prompts``."""
    count, seed = options.num_prompts, options.seed
    path = Path(options.dataset_path or "")
    if options.dataset_name == "sharegpt":
        return workloads.sharegpt_asks(
            path, count, lambda text: len(tokenizer.encode(text)), output_len=options.sharegpt_output_len, seed=seed
        )
    ids = ordinary_ids(tokenizer)
    if options.dataset_name == "azure":
        return workloads.azure_asks(path, ids, seed=seed)
    if options.dataset_name == "mooncake":
        return workloads.mooncake_asks(path, ids, seed=seed)
    if options.dataset_name == "prefix_repetition":
        return workloads.prefix_repetition_asks(
            ids,
            count,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_len=options.prefix_repetition_output_len,
            seed=seed,
        )
    return workloads.random_asks(
        ids,
        count,
        options.random_input_len,
        options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        seed=seed,
    )


def _as_text(ask: PlannedRequest, tokenizer: Tokenizer) -> PlannedRequest:
    """Return ``ask`` with its prompt as text, for the chat endpoint.

    The server's ``usage`` reports the true length: the chat template adds tokens, and the text may encode to others."""
    return ask if isinstance(ask.prompt, str) else replace(ask, prompt=tokenizer.decode(ask.prompt))
