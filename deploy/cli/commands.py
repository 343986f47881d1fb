"""The registry of ``tandem`` commands: name, help, options and the function that runs each.

To add a command, add an entry to COMMANDS. The parser, ``tandem config`` and the flag reference are generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar, cast

from common.config.bench.batching import BenchBatchingConfig
from common.config.bench.compare import BenchCompareConfig
from common.config.bench.control_latency import BenchControlLatencyConfig
from common.config.bench.crosscheck import BenchCrosscheckConfig
from common.config.bench.gguf import BenchGgufConfig
from common.config.bench.goals import BenchGoalsConfig
from common.config.bench.goodput import BenchGoodputConfig
from common.config.bench.gpu import BenchGpuConfig
from common.config.bench.grammar import BenchGrammarConfig
from common.config.bench.handoff_cost import BenchHandoffCostConfig
from common.config.bench.install_peers import BenchInstallPeersConfig
from common.config.bench.kernels import BenchKernelsConfig
from common.config.bench.lent_core import BenchLentCoreConfig
from common.config.bench.mock_server import BenchMockServerConfig
from common.config.bench.observability import BenchObservabilityConfig
from common.config.bench.pages import BenchPagesConfig
from common.config.bench.plan import BenchPlanConfig
from common.config.bench.quality import BenchQualityConfig
from common.config.bench.quantization import BenchQuantizationConfig
from common.config.bench.roofline import BenchRooflineConfig
from common.config.bench.serve import BenchServeConfig
from common.config.bench.wire import BenchWireConfig
from common.config.chat import ChatConfig
from common.config.coordinator import CoordinatorConfig
from common.config.doctor import DoctorConfig
from common.config.eval import EvalConfig
from common.config.inspect import InspectConfig
from common.config.keygen import KeygenConfig
from common.config.options import Loaded, load
from common.config.quantize import QuantizeConfig
from common.config.scale import ScaleConfig
from common.config.status import StatusConfig
from common.config.top import TopConfig
from common.config.trace import TraceConfig
from common.config.up import UpConfig
from common.config.worker import WorkerConfig

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    ``function``: ``"module:name"``, imported only when the command runs, so that other commands start fast. It is
    called with the configuration and with the value of ``argument`` if there is one, and returns the exit code.
    ``fixed``: values of ``config`` fields that are not options. ``argument``: name and help of an optional positional
    argument. ``measures``: whether the command writes files named by ``--save``, ``--plot`` or ``--cost``."""

    name: str
    help: str
    config: type[Any]
    function: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    argument: tuple[str, str] | None = None
    measures: bool = False

    def load_function(self) -> Callable[..., int]:
        """Import the module of ``function`` and return the function."""
        module, _, name = self.function.partition(":")
        return cast(Callable[..., int], getattr(import_module(module), name))


COMMANDS = {
    command.name: command
    for command in (
        Command("up", "serve a model on this machine: a coordinator and its workers", UpConfig, "deploy.cli.start:up"),
        Command(
            "coordinator", "run a coordinator: HTTP API, routing, tokenization", CoordinatorConfig,
            "deploy.cli.start:coordinator",
        ),
        Command(
            "prefill", "run a prefill worker that joins a coordinator", WorkerConfig, "deploy.cli.start:worker",
            fixed={"role": "prefill"},
        ),
        Command(
            "decode", "run a decode worker that joins a coordinator", WorkerConfig, "deploy.cli.start:worker",
            fixed={"role": "decode"},
        ),
        Command(
            "chat", "chat with a running server in the terminal", ChatConfig, "deploy.cli.chat:run",
            argument=(
                "prompt",
                "send this prompt, print the answer and exit; without it, standard input is read as one prompt "
                "if it is not a terminal",
            ),
        ),
        Command("scale", "resize the worker pools of a running tandem up", ScaleConfig, "deploy.cli.scale:run"),
        Command(
            "status", "show the workers of a running server, their GPUs, and why a worker is absent", StatusConfig,
            "deploy.cli.status:run",
        ),
        Command("top", "watch a running server: workers, queue, links and requests", TopConfig, "deploy.cli.top:run"),
        Command(
            "doctor", "check this machine, a configuration and a running system, and say what to do", DoctorConfig,
            "deploy.cli.doctor:run", measures=True,
        ),
        Command(
            "trace", "show where the time of a request went, as a waterfall in text", TraceConfig,
            "deploy.cli.trace:run",
            argument=(
                "request_id",
                "the id of an answer (chatcmpl-..., resp_..., msg_...) or its x-request-id; without it, the last "
                "requests are listed",
            ),
        ),
        Command(
            "inspect", "show what a model is, needs, and how fast it will be, without loading it", InspectConfig,
            "deploy.cli.inspect:run",
        ),
        Command(
            "eval", "score a running server's answers to a set of questions", EvalConfig, "bench.eval.evaluate:run",
            measures=True,
        ),
        Command(
            "quantize", "write a checkpoint with its linear layers in 4 or 8 bits, and what that costs in quality",
            QuantizeConfig, "deploy.cli.quantize:run",
        ),
        Command(
            "bench serve", "load-test any OpenAI-compatible server", BenchServeConfig,
            "bench.commands.serve:run", measures=True,
        ),
        Command(
            "bench goodput", "find the highest request rate at which a server meets its latency objectives",
            BenchGoodputConfig, "bench.commands.goodput:run", measures=True,
        ),
        Command(
            "bench compare", "compare disaggregated and colocated pools for a workload on these cores",
            BenchCompareConfig, "bench.commands.compare:run", measures=True,
        ),
        Command(
            "bench plan", "predict by simulation which pools serve a workload best", BenchPlanConfig,
            "bench.commands.plan:run", measures=True,
        ),
        Command(
            "bench batching", "compare continuous with static batching on one server", BenchBatchingConfig,
            "bench.commands.batching:run", measures=True,
        ),
        Command(
            "bench roofline", "measure this machine's bandwidth, compute and transfer limits", BenchRooflineConfig,
            "deploy.cli.start:roofline", measures=True,
        ),
        Command(
            "bench kernels", "measure attention and linear layers against this machine's limits", BenchKernelsConfig,
            "deploy.cli.start:kernels", measures=True,
        ),
        Command(
            "bench goals", "measure the goals C1 to C12 on two cores, beside vLLM", BenchGoalsConfig,
            "bench.commands.goals:run", measures=True,
        ),
        Command(
            "bench gpu", "check kernels and measure the goals G1 to G8 on one GPU", BenchGpuConfig,
            "bench.commands.gpu:run", measures=True,
        ),
        Command(
            "bench wire", "measure the KV transfer rate between two processes, by link", BenchWireConfig,
            "bench.micro.wire:run", measures=True,
        ),
        Command(
            "bench control-latency", "measure control-message round trips during KV transfers",
            BenchControlLatencyConfig, "bench.micro.control_latency:run", measures=True,
        ),
        Command(
            "bench handoff-cost", "measure the CPU time that fault detection and verification add to a request",
            BenchHandoffCostConfig, "bench.micro.handoff_cost:run", measures=True,
        ),
        Command(
            "bench observability", "measure what tracing, the live page and access lines cost the coordinator",
            BenchObservabilityConfig, "bench.micro.observability:run", measures=True,
        ),
        Command(
            "bench lent-core", "measure engine steps with and without a core lent by an idle worker",
            BenchLentCoreConfig, "bench.micro.lent_core:run", measures=True,
        ),
        Command(
            "bench grammar", "measure the cost of token masks, and what hostile grammars do to other streams",
            BenchGrammarConfig, "bench.micro.grammar:run", measures=True,
        ),
        Command(
            "bench gguf", "measure a GGUF file served by Tandem and by llama.cpp", BenchGgufConfig,
            "bench.commands.gguf:run", measures=True,
        ),
        Command(
            "bench quantization", "measure a checkpoint served as it is and with int8 and int4 weights",
            BenchQuantizationConfig, "bench.commands.quantization:run", measures=True,
        ),
        Command(
            "bench crosscheck", "compare bench serve with other load generators", BenchCrosscheckConfig,
            "bench.micro.crosscheck:run", measures=True,
        ),
        Command(
            "bench mock-server", "run a server that answers on a scripted schedule, to check load generators with",
            BenchMockServerConfig, "bench.load.mock_server:run",
        ),
        Command(
            "bench quality", "measure what bfloat16, int8 and fp8 change in perplexity and tokens", BenchQualityConfig,
            "bench.eval.quality:run", measures=True,
        ),
        Command(
            "bench pages", "write the tables of docs/benchmarks from saved figures", BenchPagesConfig,
            "bench.commands.pages:run",
        ),
        Command(
            "bench install-peers", "install vLLM and NIXL, or llama.cpp, in a separate environment, for comparison",
            BenchInstallPeersConfig, "bench.peers.install:run",
        ),
        Command(
            "keygen", "create the keys with which the processes of a cluster authenticate", KeygenConfig,
            "deploy.cli.start:keygen",
        ),
    )
}  # fmt: skip
"""All commands by name."""
FAMILIES = {"bench": "benchmark servers, pool layouts, kernels and links"}
"""Command groups (the first word of two-word commands) and their help."""
CONFIG_HELP = "print the options of a command, their values and where each was set"
"""What ``tandem config`` does. It is no entry of COMMANDS, since it takes the flags of any other command."""
CHECK_HELP = (
    "check a YAML file of options instead: names every unknown or ill-typed option with its line; with a COMMAND also "
    "whether that command accepts them together; exit code 1 if anything is wrong"
)
"""What ``tandem config --check FILE [COMMAND]`` does."""

CONFIGS = tuple(dict.fromkeys(command.config for command in COMMANDS.values()))


def load_config(config: type[C], given: Mapping[str, Any], environ: Mapping[str, str], **fixed: Any) -> Loaded[C]:
    """Build the configuration of a command from parsed flags, the environment and ``fixed`` fields. Raises StartError
    if a value is invalid."""
    return load(config, given, environ, CONFIGS, **fixed)
