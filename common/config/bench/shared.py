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
SAVE_HELP = "JSON file to save the results in; FILE#NAME adds them under that name to a file of several runs"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The number of requests and their lengths, with the names of ``vllm bench serve`` where it has the option."""

    num_prompts: int = option(100, "number of requests in a run", count(1), "load")
    seed: int = option(0, "random seed of prompts and arrival times", count(0, 2**31 - 1), "load")
    tokenizer: str | None = option(
        None,
        "tokenizer.json with which prompts are generated",
        TEXT,
        "workload",
        shown_default="the server's /tokenize",
    )
    random_input_len: int = option(1024, "length of random prompts, in tokens", count(1, LONGEST_TOKENS), "workload")
    random_output_len: int = option(
        128,
        "length of answers to random prompts, in tokens (bench batching: mean)",
        count(1, LONGEST_TOKENS),
        "workload",
    )
    save: str | None = option(None, SAVE_HELP, TEXT, "results")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(PromptOptions):
    """The contents of the requests."""

    dataset_name: Dataset = option(
        "random",
        "source of the requests: random and prefix_repetition are generated, the others are read from --dataset-path",
        one_of("random", "prefix_repetition", "sharegpt", "azure", "mooncake"),
        "workload",
    )
    dataset_path: str | None = option(None, "file of the sharegpt, azure or mooncake dataset", TEXT, "workload")
    random_range_ratio: float = option(
        0.0, "both random lengths vary by up to this fraction, up and down", decimal(0, 0.999), "workload"
    )
    random_prefix_len: int = option(
        0,
        "length of a prefix that all random prompts share, in tokens; comes before their own",
        count(0, LONGEST_TOKENS),
        "workload",
    )
    prefix_repetition_prefix_len: int = option(
        256, "length of each shared prefix of prefix_repetition, in tokens", count(1, LONGEST_TOKENS), "workload"
    )
    prefix_repetition_suffix_len: int = option(
        256, "length of each prompt after its shared prefix, in tokens", count(1, LONGEST_TOKENS), "workload"
    )
    prefix_repetition_num_prefixes: int = option(
        10, "number of different shared prefixes of prefix_repetition", count(1, 1 << 20), "workload"
    )
    prefix_repetition_output_len: int = option(
        128, "length of answers to prefix_repetition prompts, in tokens", count(1, LONGEST_TOKENS), "workload"
    )
    sharegpt_output_len: int | None = option(
        None,
        "length of answers to sharegpt prompts, in tokens",
        count(1, LONGEST_TOKENS),
        "workload",
        shown_default="that of the recorded answer",
    )
    burstiness: float = option(
        1.0, "distribution of arrivals: 1 is a Poisson process, smaller is burstier, inf is evenly spaced", RATE, "load"
    )
    plot: str | None = option(
        None, "PNG or SVG file for a plot of the results (needs matplotlib: pip install -e '.[bench]')", TEXT, "results"
    )

    def __post_init__(self) -> None:
        needs_file = self.dataset_name in ("sharegpt", *TRACES)
        if needs_file and not self.dataset_path:
            raise StartError(f"--dataset-name {self.dataset_name} needs a file", "none is named", "give --dataset-path")
        if self.dataset_path and not needs_file:
            why = f"{self.dataset_name} prompts are generated"
            raise StartError(
                "--dataset-path would have no effect", why, "give --dataset-name sharegpt, azure or mooncake"
            )


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions(DatasetOptions):
    """The contents and the arrival times of the requests."""

    request_rate: float = option(
        math.inf,
        "mean number of requests per second; inf sends all at once, or a trace at its recorded times",
        RATE,
        "load",
    )
    time_scale: float = option(1.0, "factor on the recorded times of a trace; 2 halves its rate", RATE, "workload")

    @property
    def drawn(self) -> bool:
        """Whether arrival times are random; else requests arrive all at once or at the times of a trace."""
        return math.isfinite(self.request_rate)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burstiness != 1 and not self.drawn:
            why = "requests arrive all at once, or at the times of a trace"
            raise StartError("--burstiness would have no effect", why, "leave it out, or give --request-rate")
        if self.time_scale != 1 and (self.drawn or self.dataset_name not in TRACES):
            why = "requests do not arrive at the times of a trace"
            raise StartError(
                "--time-scale would have no effect",
                why,
                "leave it out, or give a trace with --dataset-name and no --request-rate",
            )


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How requests are sent, and their sampling parameters."""

    backend: Backend = option(
        "openai",
        "API to call: openai (completions) or openai-chat (chat completions)",
        one_of("openai", "openai-chat"),
        "load",
    )
    num_warmups: int = option(1, "number of uncounted requests sent one by one before the run", count(0), "load")
    ignore_eos: bool = option(
        True, "generate answers of the full length even if the model ends them earlier", SWITCH, "load"
    )
    temperature: float | None = option(
        None, "sampling temperature; 0 is greedy", decimal(0, 2), "load", shown_default="the server's"
    )
    top_p: float | None = option(
        None,
        "sample from the most likely tokens with this total probability",
        decimal(0, 1),
        "load",
        shown_default="the server's",
    )
    top_k: int | None = option(
        None, "sample from this many most likely tokens; 0 is off", count(0), "load", shown_default="the server's"
    )
    min_p: float | None = option(
        None,
        "sample from tokens with at least this fraction of the probability of the most likely one",
        decimal(0, 1),
        "load",
        shown_default="the server's",
    )
    extra_body: dict[str, Any] | None = option(
        None, "JSON object with fields to add to every request", JSON_OBJECT, "load"
    )
    answer_timeout: float = option(600.0, "seconds after which an unfinished answer fails", DEADLINE, "load")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(DatasetOptions, RequestOptions):
    """The contents of the requests and how they are sent."""

    max_concurrency: int | None = option(
        None, "maximum number of requests in flight; further ones wait in the client", count(1), "load"
    )


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ClientOptions):
    """The server and the model to measure."""

    served_model_name: str | None = option(
        None,
        "model to measure, one of those that the server lists",
        TEXT,
        "client",
        aliases=("--model",),
        shown_default="the server's first",
    )
    header: dict[str, str] | None = option(
        None, "HTTP headers to send with every request", PAIRS, "client", secret=True
    )


@dataclass(frozen=True, kw_only=True)
class SaveOption:
    """The file to save results in."""

    save: str | None = option(None, SAVE_HELP, TEXT, "results")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Options of benchmarks that measure this machine without a server."""

    threads: int = option(1, "number of compute threads", count(1, 4096), "cores")
    save: str | None = option(None, SAVE_HELP, TEXT, "results")
