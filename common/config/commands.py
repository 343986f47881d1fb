"""What each process can be told: one frozen dataclass per role.

The fields are the options: ``--max-model-len``, ``TANDEM_MAX_MODEL_LEN`` and the YAML key ``max_model_len`` are
the same thing (see :mod:`common.config.options`). None means "chosen automatically"; who chooses prints what and why.
Light: imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from common.config import redaction
from common.config.options import (
    ADDRESS,
    CPUS,
    DEADLINE,
    FLAGS,
    JSON_OBJECT,
    KEY,
    LIST,
    NUMBERS,
    ORIGINS,
    PAIRS,
    PORT,
    RATE,
    RATES,
    SECONDS,
    SIZE,
    SWITCH,
    TEXT,
    Loaded,
    count,
    decimal,
    load,
    one_of,
    option,
    parse_cpus,
    parse_key,
    positional,
)
from common.core.errors import StartError
from common.core.ids import MAX_NAME_BYTES, WorkerName
from common.net.hosts import bracketed, is_loopback, is_unspecified
from common.net.keys import PARTIES, ClusterKeys, Party
from common.net.keys import load as load_keys
from common.net.keys import mint as mint_keys
from common.net.messages import Role
from common.platform.secret_files import read_secret

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
KvTransport = Literal["auto", "shm", "zmq", "nixl"]
LocalPrefill = Literal["auto", "never", "always"]
NoPrefillPolicy = Literal["local", "wait", "reject"]
KvEncryption = Literal["curve", "none"]
MetricsAccess = Literal["open", "key"]
Backend = Literal["openai", "openai-chat"]
RampStrategy = Literal["linear", "exponential"]
Dataset = Literal["random", "prefix_repetition", "sharegpt", "azure", "mooncake"]
TRACES = ("azure", "mooncake")
"""Datasets whose requests have times of their own."""
LONGEST_TOKENS = 1 << 24
"""Of a prompt or an answer to measure with: more are a mistake, and would be made up in memory before anybody looks."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

DEFAULT_CONTROL_PORT = 8001
DEFAULT_OBJECTIVES = "ttft:1000,tpot:40"


# -- shared parts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model is served, and under what name. An empty ``model`` is the built-in one."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )
    revision: str | None = option(None, "branch, tag or commit of a hub model", TEXT, "model", shown_default="main")
    served_model_name: str | None = option(
        None, "name that clients use for the model", TEXT, "model", shown_default="MODEL as given"
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output, in tokens",
        count(1),
        "model",
        shown_default="the model's, cut to what the KV pool holds",
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model", SWITCH, "model")

    @property
    def served_name(self) -> str:
        """The name clients see: as configured, else the model as it was given."""
        return self.served_model_name or self.model


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What every long-lived process takes."""

    drain_timeout: float = option(30.0, "how long running requests may take to finish at a stop", SECONDS, "queue")
    log_level: LogLevel = option(
        "info", "least severity that is logged", one_of("debug", "info", "warning", "error"), "logs"
    )
    log_format: LogFormat = option("text", "log lines for people or for programs", one_of("text", "json"), "logs")
    debug: bool = option(False, "show tracebacks of failed starts", SWITCH, "logs")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What processes take that may talk to other machines."""

    cluster_key_file: str | None = option(
        None, "file of tandem keygen: the parts know each other by its keys and encrypt", TEXT, "network and keys"
    )
    insecure_cluster: bool = option(
        False,
        "let the parts talk in plain text over other addresses than loopback (tandem up: over NIXL on loopback)",
        SWITCH,
        "network and keys",
    )

    def keys_of(self, party: Party) -> ClusterKeys | None:
        """The keys of a process of this role, None without a file. StartError if the file is none."""
        return load_keys(Path(self.cluster_key_file), party) if self.cluster_key_file else None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a worker computes."""

    dtype: Dtype = option(
        "auto",
        "type of weights, activations and KV (auto: the checkpoint's; float32 on CPUs without bf16 instructions)",
        one_of("auto", "float32", "bfloat16", "float16"),
        "model",
    )
    quantization: Quantization = option(
        "none",
        "int8: linear layers with weights of one byte (the same on all workers)",
        one_of("none", "int8"),
        "model",
    )
    kv_cache_memory: int | None = option(
        None,
        "bytes of KV pool per worker",
        SIZE,
        "memory",
        aliases=("--kv-cache-memory-bytes",),
        shown_default="a quarter of free memory divided by the workers, at most 4GiB each",
    )
    num_kv_blocks: int | None = option(
        None,
        "blocks of KV pool per worker; wins over --kv-cache-memory",
        count(1),
        "memory",
        aliases=("--num-gpu-blocks-override",),
        shown_default="from the memory",
    )
    block_size: int = option(16, "tokens per KV block, a multiple of 16", count(16, 1 << 16), "memory")
    max_num_seqs: int = option(64, "sequences decoded together", count(1, 1 << 16), "batch")
    max_num_batched_tokens: int | None = option(
        None,
        "tokens computed in one step",
        count(1),
        "batch",
        shown_default="512 on a CPU, 2048 on a GPU",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of shared prompt prefixes", SWITCH, "batch")
    kv_transport: KvTransport = option(
        "auto",
        "how KV blocks travel (auto: shared memory on one host, else ZeroMQ; nixl: read by decode over UCX)",
        one_of("auto", "shm", "zmq", "nixl"),
        "transfer",
    )
    threads: int | None = option(
        None, "compute threads per worker", count(1, 4096), "cores", shown_default="one per core of its share"
    )
    cpus: str | None = option(
        None, "cores to run on, such as 0-3,5 (tandem up deals them out)", CPUS, "cores", shown_default="all"
    )

    def __post_init__(self) -> None:
        if self.block_size % 16:
            raise StartError(
                f"--block-size {self.block_size} cannot be used",
                "the prefix cache works in steps of 16 tokens",
                "give a multiple of 16",
            )

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The cores of ``cpus``; None when every core may be used."""
        return parse_cpus(self.cpus) if self.cpus else None


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How the door treats clients."""

    host: str = option("127.0.0.1", "address that HTTP listens on", TEXT, "network and keys")
    port: int = option(8000, "port that HTTP listens on (0: a free one)", PORT, "network and keys")
    control_port: int = option(DEFAULT_CONTROL_PORT, "port that workers dial (0: a free one)", PORT, "network and keys")
    chat_template: str | None = option(None, "Jinja file, or template text", TEXT, "model", shown_default="the model's")
    local_prefill: LocalPrefill = option(
        "auto", "prefill on the decode worker: by cost, never, always", one_of("auto", "never", "always"), "routing"
    )
    no_prefill_policy: NoPrefillPolicy = option(
        "local",
        "when no prefill worker is ready: prefill on decode, wait, or answer 503",
        one_of("local", "wait", "reject"),
        "routing",
    )
    failure_timeout: float = option(
        2.0,
        "how long a worker may be silent, or make no progress, before its requests move; workers follow",
        decimal(0.5, 60, "SECONDS"),
        "routing",
    )
    max_queued_requests: int = option(2048, "requests that may wait; more get 429", count(1), "queue")
    max_queued_tokens: int = option(4_000_000, "prompt tokens that may wait; more get 429", count(1), "queue")
    request_timeout: float = option(600.0, "deadline of a request", DEADLINE, "queue")
    client_timeout: float = option(
        30.0, "how long a client may not read, or take to send its body, before it is cut", DEADLINE, "queue"
    )
    max_body_bytes: int = option(8 << 20, "largest request body", SIZE, "queue", shown_default="8MiB")
    api_key: str | None = option(None, "key that clients must send", KEY, "network and keys", secret=True)
    api_key_file: str | None = option(
        None, "file with such keys, one per line, that no other user can read", TEXT, "network and keys"
    )
    admin_api_key: str | None = option(
        None, "key for /admin", KEY, "network and keys", secret=True, shown_default="a client's key"
    )
    insecure_http: bool = option(
        False,
        "listen on other addresses than loopback without a key, and serve pages of every web site",
        SWITCH,
        "network and keys",
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        "origins whose web pages may call this server from a browser; * for all",
        ORIGINS,
        "network and keys",
        shown_default="none",
    )
    metrics_access: MetricsAccess | None = option(
        None,
        "whether /metrics needs a key",
        one_of("open", "key"),
        "network and keys",
        shown_default="open on loopback; elsewhere key if clients need one",
    )
    keys_from_file: tuple[str, ...] = field(default=(), repr=False)
    """What ``api_key_file`` holds. It is read once: it may be a pipe, and other processes of ``tandem up`` get this."""

    def __post_init__(self) -> None:
        if self.api_key_file and not self.keys_from_file:
            object.__setattr__(self, "keys_from_file", _keys_in(Path(self.api_key_file)))

    def api_keys(self) -> tuple[str, ...]:
        """Every key a client may use, from the flag and from the file."""
        return (*((self.api_key,) if self.api_key else ()), *self.keys_from_file)

    @property
    def metrics_need_a_key(self) -> bool:
        if self.metrics_access is not None:
            return self.metrics_access == "key"
        return bool(self.api_keys()) and not is_loopback(self.host)

    def _check_http(self) -> None:
        if not (is_loopback(self.host) or self.insecure_http or self.api_keys()):
            raise StartError(
                f"will not listen on {self.host} without a key",
                "anybody who reaches that address could use the model",
                "set --api-key or --api-key-file, or say --insecure-http",
            )
        if self.metrics_access == "key" and not (self.api_keys() or self.admin_api_key):
            raise StartError("--metrics-access key needs a key", "there is none", "set --api-key or --api-key-file")


# -- one per role -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ModelOptions, EngineOptions, ClusterOptions, ProcessOptions):
    """A prefill, decode or colocated worker."""

    role: Role
    coordinator: str = option(
        f"127.0.0.1:{DEFAULT_CONTROL_PORT}", "control address of the coordinator", ADDRESS, "network and keys"
    )
    name: str | None = option(
        None, "name of this worker", TEXT, "network and keys", shown_default="its role, host and process id"
    )
    host: str = option(
        "127.0.0.1", "address that KV hand-offs arrive on, as other workers reach it", TEXT, "network and keys"
    )
    kv_encryption: KvEncryption | None = option(
        None,
        "how KV travels over the network; none only shows both ends that the coordinator knows them",
        one_of("curve", "none"),
        "transfer",
        shown_default="curve with --cluster-key-file, else none",
    )
    workers_on_host: int = option(1, "workers that share this machine's memory and cores", count(1, 4096), "memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and len(self.name.encode()) > MAX_NAME_BYTES:
            raise StartError(
                f"--name {self.name[:32]}... is too long",
                f"a worker's name has at most {MAX_NAME_BYTES} bytes",
                "give a shorter one",
            )

    def check_binds(self, keys: ClusterKeys | None = None) -> None:
        """Refuses to talk in plain text beyond this machine unless told so. ``keys``: those that a launcher has given
        this process."""
        keys = keys or self.keys_of(self.role)
        if self.kv_encryption == "curve" and keys is None:
            raise StartError(
                "--kv-encryption curve needs keys",
                "workers without keys cannot tell each other from strangers",
                "make some with tandem keygen and give --cluster-key-file",
            )
        accepted = self.insecure_cluster and is_loopback(self.host) and is_loopback(self._dialled)
        if self.kv_transport == "nixl" and self.encrypts_kv(keys) and not accepted:
            raise StartError(
                "--kv-transport nixl cannot encrypt KV",
                "UCX sends it in plain text, and there are cluster keys",
                "give --kv-encryption none on all prefill and decode workers, or another --kv-transport",
            )
        for host, flag in ((self.host, "--host"), (self._dialled, "--coordinator")):
            _check_cluster(host, flag, self.insecure_cluster or keys is not None)

    @property
    def out_of_reach(self) -> bool:
        """Whether other machines take part, whose prefill workers could not send KV here."""
        return self.role != "prefill" and is_loopback(self.host) and not is_loopback(self._dialled)

    @property
    def _dialled(self) -> str:
        return self.coordinator.rpartition(":")[0]

    def encrypts_kv(self, keys: ClusterKeys | None) -> bool:
        """Whether KV travels encrypted, of a worker that has these keys."""
        return keys is not None and self.kv_encryption != "none"


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ModelOptions, ServingOptions, ClusterOptions, ProcessOptions):
    """The coordinator."""

    control_host: str = option("127.0.0.1", "address that workers dial", TEXT, "network and keys")
    expect_prefill: int = option(0, "prefill workers that must join once before /ready says yes", count(), "routing")
    expect_decode: int = option(0, "decode workers that must join once before /ready says yes", count(), "routing")
    expect_colocated: int = option(
        0, "colocated workers that must join once before /ready says yes", count(), "routing"
    )

    def check_binds(self, keys: ClusterKeys | None = None) -> None:
        """Refuses to be open to other machines unless told so. ``keys``: those that a launcher has given this
        process."""
        self._check_http()
        keys = keys or self.keys_of("coordinator")
        _check_cluster(self.control_host, "--control-host", self.insecure_cluster or keys is not None)


@dataclass(frozen=True, kw_only=True)
class UpConfig(ModelOptions, EngineOptions, ServingOptions, ClusterOptions, ProcessOptions):
    """A coordinator and its workers on this machine. ``prefill`` and ``decode`` None: 1 each, unless ``colocated``."""

    control_host: str = option(
        "127.0.0.1", "address that workers dial, and that hand-offs to workers here arrive on", TEXT, "network and keys"
    )
    prefill: int | None = option(None, "prefill workers", count(0, 4096), "pools", shown_default="1")
    decode: int | None = option(None, "decode workers", count(0, 4096), "pools", shown_default="1")
    colocated: int | None = option(
        None,
        "workers that do both, in place of the two pools",
        count(1, 4096),
        "pools",
        shown_default="1 on one core, else none",
    )
    chat: bool = option(False, "chat in this terminal once it serves", SWITCH, "pools")
    lend_cores: bool = option(
        True, "a worker that rests lends its cores to those that compute many tokens", SWITCH, "cores"
    )

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        ServingOptions.__post_init__(self)
        if self.colocated is not None and (self.prefill or self.decode):
            raise StartError(
                "--colocated excludes --prefill and --decode",
                "a colocated worker does the work of both pools",
                "give either --colocated K, or --prefill N --decode M",
            )
        if self.decode == 0 and self.colocated is None:
            raise StartError(
                "--decode 0 serves nobody",
                "tokens after the first come from a decode worker",
                "give --decode 1 or more, or --colocated K",
            )

    def check_binds(self) -> None:
        """Refuses to be open to other machines, or to other users of this one, unless told so. The parts have keys in
        any case: ``insecure_cluster`` is for what keys cannot close."""
        self._check_http()
        if self.kv_transport == "nixl" and not (self.insecure_cluster and is_loopback(self.control_host)):
            raise StartError(
                "--kv-transport nixl lets strangers in",
                "UCX listens without keys: every user of this machine could read and write the workers' memory",
                "give another --kv-transport, or, where all users are trusted, --insecure-cluster on loopback",
            )
        if is_loopback(self.control_host):
            return
        if not self.cluster_key_file:
            raise StartError(
                f"--control-host {self.control_host} would let nobody in",
                "workers of other machines join with the keys of a file, and there is none",
                "run tandem keygen, and give --cluster-key-file here and to those workers",
            )
        if is_unspecified(self.control_host):
            raise StartError(
                f"--control-host {self.control_host} is no address that others can dial",
                "decode workers of this machine take hand-offs at the same address, and say so to the others",
                "give the address by which the other machines reach this one",
            )

    def keys(self, *parties: Party) -> dict[Party, ClusterKeys]:
        """The keys of each of these roles: the file's, else new ones, which no other process has. StartError as of
        :meth:`ClusterOptions.keys_of`."""
        if not self.cluster_key_file:
            return mint_keys()
        return {party: load_keys(Path(self.cluster_key_file), party) for party in parties}

    def pools(self, cores: int) -> tuple[int, int, int]:
        """How many prefill, decode and colocated workers, on a machine with ``cores`` usable cores."""
        if self.colocated is not None:
            return 0, 0, self.colocated
        if self.prefill is None and self.decode is None and cores == 1:
            return 0, 0, 1
        return 1 if self.prefill is None else self.prefill, 1 if self.decode is None else self.decode, 0

    def for_coordinator(self, **changes: Any) -> CoordinatorConfig:
        """The configuration of this system's coordinator, which gets its keys from the launcher, not from the file."""
        return CoordinatorConfig(**_shared(self, CoordinatorConfig, {"cluster_key_file": None, **changes}))

    def for_worker(self, role: Role, name: WorkerName, **changes: Any) -> WorkerConfig:
        """The configuration of one of this system's workers; its data socket is where the control socket is."""
        host = bracketed(self.control_host)
        mine = {"role": role, "name": name, "host": host, "cluster_key_file": None, **changes}
        return WorkerConfig(**_shared(self, WorkerConfig, mine))


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """What every client of a running server takes."""

    url: str = option("http://127.0.0.1:8000", "the server", TEXT, "client", aliases=("--base-url",))
    api_key: str | None = option(None, "key to send", KEY, "client", secret=True)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ClientOptions):
    """``tandem chat``: a client, on any machine."""

    system_prompt: str | None = option(None, "system message", TEXT, "chat")
    max_tokens: int | None = option(None, "longest answer", count(1), "chat", shown_default="what fits")
    temperature: float | None = option(None, "0 is greedy", decimal(0, 2), "chat", shown_default="the server's")


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(ClientOptions):
    """``tandem scale``: a client of a running ``tandem up``; None leaves a pool as it is."""

    prefill: int | None = option(None, "prefill workers wanted", count(0, 4096), "pools", shown_default="as they are")
    decode: int | None = option(None, "decode workers wanted", count(0, 4096), "pools", shown_default="as they are")


@dataclass(frozen=True, kw_only=True)
class LabelOption:
    """A client does not know how the server that it measures was started."""

    label: str | None = option(
        None, "name of the run, or the server's command, saved with the figures", TEXT, "results"
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ClientOptions, LabelOption):
    """``tandem eval``: the golden set, asked of any OpenAI-compatible server."""

    served_model_name: str | None = option(
        None, "which of its models is asked", TEXT, "evaluation", shown_default="the first"
    )
    golden: str | None = option(
        None, "golden set to ask, JSON lines", TEXT, "evaluation", shown_default="the built-in model's"
    )
    skills: str | None = option(None, "ask only these, with commas between", TEXT, "evaluation", shown_default="all")
    concurrency: int = option(4, "requests in flight", count(1), "evaluation")
    save: str | None = option(None, "file to save the figures in, as a baseline", TEXT, "evaluation")
    compare: str | None = option(None, "baseline to compare with; a drop exits with 1", TEXT, "evaluation")
    tolerance: float = option(0.01, "drop of the share over all items that is no drop yet", decimal(0, 1), "evaluation")
    skill_tolerance: float = option(0.05, "the same for one skill", decimal(0, 1), "evaluation")
    failures: int = option(0, "wrong answers to show", count(0), "evaluation")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How many requests there are, and how long; named as in ``vllm bench serve`` wherever it has the same."""

    num_prompts: int = option(100, "requests of a run", count(1), "load")
    seed: int = option(0, "of prompts and arrivals", count(0, 2**31 - 1), "load")
    tokenizer: str | None = option(
        None, "tokenizer.json that prompts are made with", TEXT, "workload", shown_default="the server's /tokenize"
    )
    random_input_len: int = option(1024, "prompt tokens", count(1, LONGEST_TOKENS), "workload")
    random_output_len: int = option(128, "tokens of an answer", count(1, LONGEST_TOKENS), "workload")
    save: str | None = option(None, "JSON file to save the figures in", TEXT, "results")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(PromptOptions):
    """What is asked."""

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
    """What is asked, and when."""

    request_rate: float = option(
        math.inf, "requests per second, in the mean; inf sends all at once, a trace then at its own times", RATE, "load"
    )
    time_scale: float = option(1.0, "factor on the times of a trace: 2 is half its pace", RATE, "workload")

    @property
    def drawn(self) -> bool:
        """Whether times are drawn: else requests come all at once, or at the times of a trace."""
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
    """How a server is asked."""

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
    """What is asked of a server, and how."""

    max_concurrency: int | None = option(None, "requests in flight; more wait in the client", count(1), "load")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ClientOptions):
    """Which model of which server is measured."""

    served_model_name: str | None = option(
        None, "which of its models is measured", TEXT, "client", aliases=("--model",), shown_default="the first"
    )
    header: dict[str, str] | None = option(None, "headers of every request", PAIRS, "client", secret=True)


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig(TargetOptions, ArrivalOptions, LoadOptions, LabelOption):
    """``tandem bench serve``: one run of load against any OpenAI-compatible server."""

    ramp_up_strategy: RampStrategy | None = option(
        None, "how the rate grows during the run", one_of("linear", "exponential"), "load"
    )
    ramp_up_start_rps: float | None = option(None, "requests per second at its start", RATE, "load")
    ramp_up_end_rps: float | None = option(None, "requests per second at its end", RATE, "load")
    goodput: str | None = option(
        None, "objectives in ms, such as ttft:1000,tpot:40 (ttft, tpot, e2el)", LIST, "results"
    )
    metadata: dict[str, str] | None = option(None, "more to save with them", PAIRS, "results")
    percentile_metrics: str = option(
        "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue",
        "metrics that are shown, the last two with --max-concurrency, the last with a rate besides",
        TEXT,
        "results",
    )
    metric_percentiles: tuple[float, ...] = option((99.0,), "percentiles of them", NUMBERS, "results")
    save_detailed: bool = option(False, "save every request, not only the figures of all", SWITCH, "results")

    @property
    def drawn(self) -> bool:
        return super().drawn or self.ramp_up_strategy is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(ramp) and not all(ramp):
            why = "a rate that grows has a way, a start and an end"
            todo = "give --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            raise StartError("the ramp is not complete", why, todo)
        if any(ramp) and (math.isinf(ramp[1] or 0) or math.isinf(ramp[2] or 0)):
            raise StartError("a ramp has no infinite rate", "its requests need times", "give numbers")
        if self.save_detailed and not self.save:
            raise StartError("--save-detailed saves nowhere", "no file is named", "give --save FILE")
        if any(not 0 <= percent <= 100 for percent in self.metric_percentiles):
            raise StartError("--metric-percentiles is off the scale", "it takes 0 to 100", "correct it")


@dataclass(frozen=True, kw_only=True)
class BenchGoodputConfig(TargetOptions, LoadOptions):
    """``tandem bench goodput``: the highest rate at which most requests are inside the objectives."""

    goodput: str = option(
        DEFAULT_OBJECTIVES, "objectives in ms, or as multiples of the unloaded median: ttft:5x,tpot:3x", LIST, "results"
    )
    attainment: float = option(0.9, "share of requests that must be inside them", decimal(0.01, 1), "results")
    rates: tuple[float, ...] | None = option(
        None, "requests per second to try", RATES, "load", shown_default="searched for"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_concurrency is not None:
            why = "no objective counts what waits in the client, so no rate would ever be too high"
            raise StartError("--max-concurrency cannot be given here", why, "limit the server (--max-num-seqs)")


@dataclass(frozen=True, kw_only=True)
class BenchCompareConfig(ArrivalOptions, LoadOptions):
    """``tandem bench compare``: the same load on several systems of the same cores."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )
    systems: str | None = option(
        None,
        "what is started in turn: 2p1d has 2 prefill and 1 decode worker, 2c 2 colocated",
        TEXT,
        "systems",
        shown_default="1p1d,1c,2c; on more than two cores 2p1d,1p2d,3c as well",
    )
    up_flags: str | None = option(None, "flags for each tandem up, in one word", FLAGS, "systems")
    runs: int = option(3, "rounds, each with all systems", count(1, 1000), "systems")
    url: str | None = option(None, "a running server to compare with, too", TEXT, "systems")
    api_key: str | None = option(None, "key to send it", KEY, "systems", secret=True)
    served_model_name: str | None = option(
        None, "which of its models is compared", TEXT, "systems", shown_default="the first"
    )
    goodput: str = option(
        DEFAULT_OBJECTIVES, "objectives in ms, or as multiples of the unloaded median: ttft:5x,tpot:3x", TEXT, "results"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            holds_key = redaction.holds_key(self.up_flags or "")
        except ValueError as error:
            raise StartError("--up-flags is no list of flags", str(error), "write it as for a shell") from None
        if holds_key:
            why = "whoever lists this machine's processes would read it"
            raise StartError("--up-flags holds a key", why, "leave it out: they answer on this machine only")


@dataclass(frozen=True, kw_only=True)
class BenchBatchingConfig(TargetOptions, RequestOptions, PromptOptions, LabelOption):
    """``tandem bench batching``: static against continuous batching on one server."""

    batch_size: int = option(8, "requests that a static batch has", count(1), "load")
    runs: int = option(3, "rounds", count(1, 1000), "load")


@dataclass(frozen=True, kw_only=True)
class BenchPlanConfig(ArrivalOptions):
    """``tandem bench plan``: systems that are not there, simulated with measured step costs."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )
    systems: str = option(
        "1p1d,2c,2p1d,1p2d,3c,3p1d,2p2d,1p3d,4c", "what is simulated: 2p1d has 2 prefill and 1 decode worker", TEXT,
        "systems",
    )  # fmt: skip
    runs: int = option(3, "simulated rounds, each with arrivals of its own", count(1, 1000), "systems")
    threads: int = option(1, "compute threads of each worker, when costs are measured", count(1, 4096), "systems")
    cost: str | None = option(
        None,
        "file of measured step costs; written if it is not there",
        TEXT,
        "systems",
        shown_default="measured, not kept",
    )
    num_kv_blocks: int = option(4096, "blocks of KV pool of each worker", count(1), "systems")
    block_size: int = option(16, "tokens of a block", count(16, 1 << 16), "systems")
    max_num_seqs: int = option(64, "sequences that a worker decodes together", count(1, 1 << 16), "systems")
    max_num_batched_tokens: int = option(512, "tokens that a worker computes in one step", count(1), "systems")
    link_rate: int = option(
        1 << 30, "bytes of KV per second between two workers", SIZE, "systems", shown_default="1GiB"
    )
    lend_cores: bool = option(True, "workers that rest lend their cores, as those of one machine do", SWITCH, "systems")
    check: str | None = option(None, "file of tandem bench compare to hold the plan against", TEXT, "results")
    tolerance: float = option(0.5, "how far off the check may be", decimal(0, 1), "results")
    goodput: str = option(DEFAULT_OBJECTIVES, "objectives in ms", TEXT, "results")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            why = "a step has a token of each sequence"
            raise StartError("--max-num-batched-tokens is below --max-num-seqs", why, "raise it, or lower the other")
        if self.block_size % 16:
            why = "the prefix cache works in steps of 16 tokens"
            raise StartError(f"--block-size {self.block_size} cannot be used", why, "give a multiple of 16")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """What every measurement of this machine, without a server, is told."""

    threads: int = option(1, "compute threads; a worker on one of two cores has one", count(1, 4096), "cores")
    save: str | None = option(None, "JSON file to save the figures in", TEXT, "results")


@dataclass(frozen=True, kw_only=True)
class BenchRooflineConfig(LimitOptions):
    """``tandem bench roofline``: what this machine can do at best."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )


@dataclass(frozen=True, kw_only=True)
class BenchKernelsConfig(LimitOptions):
    """``tandem bench kernels``: attention and linear layers beside what the machine can do."""

    dtype: Dtype = option(
        "auto",
        "element type (auto: bfloat16; float32 on CPUs without bf16 instructions)",
        one_of("auto", "float32", "bfloat16", "float16"),
        "model",
    )
    heads: str = option(
        "12/4/64", "query heads, key-value heads and head size, of attention and its linear layers", TEXT, "model"
    )
    layers: str = option(
        "768/2048/12/8192",
        "hidden and intermediate size, number of layers and of words in the vocabulary",
        TEXT,
        "model",
    )


@dataclass(frozen=True, kw_only=True)
class KeygenConfig:
    """``tandem keygen``: new keys for a cluster, or the part of them that one role needs."""

    out: str | None = option(None, "file to write", TEXT, "network and keys", shown_default="cluster.key, or ROLE.key")
    role: str | None = option(
        None, "write only what this role needs", one_of(*PARTIES), "network and keys", shown_default="all roles"
    )
    cluster_key_file: str | None = option(
        None, "file with all roles' keys, from which --role takes its part", TEXT, "network and keys"
    )
    overwrite: bool = option(False, "replace a file that exists", SWITCH, "network and keys")

    def __post_init__(self) -> None:
        if bool(self.role) != bool(self.cluster_key_file):
            raise StartError(
                "--role and --cluster-key-file go together",
                "keys of one role are taken from a file with the keys of all",
                "run tandem keygen first, then tandem keygen --role ROLE --cluster-key-file cluster.key",
            )

    @property
    def path(self) -> Path:
        return Path(self.out or f"{self.role or 'cluster'}.key")


CONFIGS: tuple[type[Any], ...] = (
    UpConfig, CoordinatorConfig, WorkerConfig, ChatConfig, ScaleConfig, EvalConfig, BenchServeConfig,
    BenchGoodputConfig, BenchCompareConfig, BenchBatchingConfig,
    BenchPlanConfig, BenchRooflineConfig, BenchKernelsConfig, KeygenConfig,
)  # fmt: skip
C = TypeVar("C")


def load_config(config: type[C], given: Mapping[str, Any], environ: Mapping[str, str], **fixed: Any) -> Loaded[C]:
    """One role's configuration from parsed flags and the environment; StartError says what is wrong."""
    return load(config, given, environ, CONFIGS, **fixed)


def _shared(config: UpConfig, other: type[Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``other`` that ``config`` has too, with ``changes`` over them."""
    mine = {item.name for item in fields(config)}
    return {item.name: getattr(config, item.name) for item in fields(other) if item.name in mine} | dict(changes)


def _keys_in(path: Path) -> tuple[str, ...]:
    """The keys of a file, one per line. A file that was emptied by mistake must not open the server."""
    try:
        lines = read_secret(path, "--api-key-file").decode().splitlines()
    except UnicodeDecodeError:
        raise StartError(f"cannot read {path}", "it is no UTF-8 text", "correct --api-key-file") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            keys.append(parse_key(line))
        except ValueError:
            raise StartError(f"line {number} of {path} is no key", f"it takes {KEY.expects}", "correct it") from None
    if not keys:
        raise StartError(f"{path} holds no key", "every line is empty or a comment", "add a key")
    return tuple(keys)


def _check_cluster(host: str, flag: str, allowed: bool) -> None:
    if not (is_loopback(host) or allowed):
        raise StartError(
            f"will not use {flag} {host} in plain text",
            "the parts would talk over the network without encryption or keys",
            "run tandem keygen and give each part --cluster-key-file, or trust the network with --insecure-cluster",
        )
