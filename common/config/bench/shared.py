"""Options that several ``tandem bench`` commands share: requests, arrival times and target server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from common.config.options import (
    DEADLINE,
    JSON_OBJECT,
    PAIRS,
    RATE,
    SWITCH,
    TEXT,
    count,
    decimal,
    one_of,
    option,
)
from common.config.shared import ClientOptions
from common.core.errors import StartError

Backend = Literal["openai", "openai-chat"]
RampStrategy = Literal["linear", "exponential"]
Dataset = Literal["random", "prefix_repetition", "sharegpt", "azure", "mooncake"]
TRACES = ("azure", "mooncake")
"""Datasets whose requests have recorded arrival times."""
LONGEST_TOKENS = 1 << 24
"""Longest prompt or answer of a benchmark, in tokens. Larger values are taken for mistakes, since the prompt would be
generated in memory first."""
DEFAULT_OBJECTIVES = "ttft:1000,tpot:40"
SAVE_HELP = "JSON file to save the figures in; FILE#NAME adds them, under that name, to a file of several runs"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The number of requests and their lengths, with the names of ``vllm bench serve`` where it has the option."""

    num_prompts: int = option(100, "requests of a run", count(1), "load")
    seed: int = option(0, "of prompts and arrivals", count(0, 2**31 - 1), "load")
    tokenizer: str | None = option(
        None, "tokenizer.json that prompts are made with", TEXT, "workload", shown_default="the server's /tokenize"
    )
    random_input_len: int = option(1024, "prompt tokens", count(1, LONGEST_TOKENS), "workload")
    random_output_len: int = option(128, "tokens of an answer", count(1, LONGEST_TOKENS), "workload")
    save: str | None = option(None, SAVE_HELP, TEXT, "results")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(PromptOptions):
    """The contents of the requests."""

    dataset_name: Dataset = option(
        "random",
        "what is asked: made-up prompts, or those of a file",
        one_of("random", "prefix_repetition", "sharegpt", "azure", "mooncake"),
        "workload",
    )
    dataset_path: str | None = option(None, "file of sharegpt, azure or mooncake", TEXT, "workload")
    random_range_ratio: float = option(
        0.0, "both lengths vary by this share of them, up and down", decimal(0, 0.999), "workload"
    )
    random_prefix_len: int = option(
        0, "tokens that all prompts share, before their own", count(0, LONGEST_TOKENS), "workload"
    )
    prefix_repetition_prefix_len: int = option(256, "tokens of a shared prefix", count(1, LONGEST_TOKENS), "workload")
    prefix_repetition_suffix_len: int = option(256, "tokens after it", count(1, LONGEST_TOKENS), "workload")
    prefix_repetition_num_prefixes: int = option(10, "different prefixes", count(1, 1 << 20), "workload")
    prefix_repetition_output_len: int = option(128, "tokens of an answer to them", count(1, LONGEST_TOKENS), "workload")
    sharegpt_output_len: int | None = option(
        None,
        "tokens of an answer to sharegpt",
        count(1, LONGEST_TOKENS),
        "workload",
        shown_default="as long as the recorded one",
    )
    burstiness: float = option(1.0, "1 is a Poisson process, less is burstier, inf a metronome", RATE, "load")
    plot: str | None = option(
        None, "PNG or SVG file to draw the figures in (needs matplotlib: pip install -e '.[bench]')", TEXT, "results"
    )

    def __post_init__(self) -> None:
        needs_file = self.dataset_name in ("sharegpt", *TRACES)
        if needs_file and not self.dataset_path:
            raise StartError(f"--dataset-name {self.dataset_name} needs a file", "none is named", "give --dataset-path")
        if self.dataset_path and not needs_file:
            why = f"{self.dataset_name} prompts are made up"
            raise StartError("--dataset-path would not be read", why, "give --dataset-name sharegpt, azure or mooncake")


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions(DatasetOptions):
    """The contents and the arrival times of the requests."""

    request_rate: float = option(
        math.inf, "requests per second, in the mean; inf sends all at once, a trace then at its own times", RATE, "load"
    )
    time_scale: float = option(1.0, "factor on the times of a trace: 2 is half its pace", RATE, "workload")

    @property
    def drawn(self) -> bool:
        """Whether arrival times are random; else requests arrive all at once or at the times of a trace."""
        return math.isfinite(self.request_rate)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burstiness != 1 and not self.drawn:
            why = "requests come all at once, or at the times of a trace"
            raise StartError("--burstiness would change nothing", why, "leave it out, or name a rate")
        if self.time_scale != 1 and (self.drawn or self.dataset_name not in TRACES):
            why = "requests do not come at the times of a trace"
            raise StartError("--time-scale would change nothing", why, "leave it out, or name a trace and no rate")


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How requests are sent, and their sampling parameters."""

    backend: Backend = option(
        "openai",
        "which endpoint is asked: completions (openai) or chat completions (openai-chat)",
        one_of("openai", "openai-chat"),
        "load",
    )
    num_warmups: int = option(1, "requests sent before, one by one, that do not count", count(0), "load")
    ignore_eos: bool = option(True, "answers are as long as asked for, whatever the model says", SWITCH, "load")
    temperature: float | None = option(None, "0 is greedy", decimal(0, 2), "load", shown_default="the server's")
    top_p: float | None = option(
        None, "tokens that together are this probable", decimal(0, 1), "load", shown_default="the server's"
    )
    top_k: int | None = option(None, "most probable tokens", count(0), "load", shown_default="the server's")
    min_p: float | None = option(
        None, "tokens this probable beside the most probable", decimal(0, 1), "load", shown_default="the server's"
    )
    extra_body: dict[str, Any] | None = option(None, "fields added to every request", JSON_OBJECT, "load")
    answer_timeout: float = option(600.0, "how long one answer may take", DEADLINE, "load")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(DatasetOptions, RequestOptions):
    """The contents of the requests and how they are sent."""

    max_concurrency: int | None = option(None, "requests in flight; more wait in the client", count(1), "load")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ClientOptions):
    """The server and the model to measure."""

    served_model_name: str | None = option(
        None, "which of its models is measured", TEXT, "client", aliases=("--model",), shown_default="the first"
    )
    header: dict[str, str] | None = option(None, "headers of every request", PAIRS, "client", secret=True)


@dataclass(frozen=True, kw_only=True)
class SaveOption:
    """The file to save results in."""

    save: str | None = option(None, SAVE_HELP, TEXT, "results")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Options of benchmarks that measure this machine without a server."""

    threads: int = option(1, "compute threads; a worker on one of two cores has one", count(1, 4096), "cores")
    save: str | None = option(None, SAVE_HELP, TEXT, "results")
