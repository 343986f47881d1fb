"""Whether disaggregation pays for a workload on this machine, and with which pools: the simulation of ``tandem bench
plan`` with the cores, the model and the options of this configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from bench.load.comparison import FIGURES, recommended
from bench.simulate.prediction import Prediction, predict
from common.builtin import path, smollm2
from common.checkpoint.preview import Preview, preview
from common.config.bench.plan import BenchPlanConfig
from common.config.doctor import DoctorConfig, WorkloadShape
from common.core.errors import StartError
from common.kv.layout import KvLayout
from common.platform.device import choose_dtype, probe_cpu
from common.platform.gpu import Gpu
from deploy.doctor.finding import Finding, good, warning
from deploy.launcher import fleet
from deploy.launcher.preflight import kv_bytes

MOST_WORKERS = 4
"""Most workers of a simulated system; with more cores, each worker has several."""
REQUESTS, ROUNDS = 100, 3
SUBJECT = "workload"


class Advice:
    """The findings about a workload, and the figures behind them for ``--json``."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.figures: dict[str, Any] | None = None


def advise(config: DoctorConfig, shape: WorkloadShape, gpus: list[Gpu], console: Console) -> Advice:
    """Measure the model's steps, or read them from ``--cost``, and simulate. Raises StartError if that is not possible:
    a model that cannot be loaded, or prompts that do not fit."""
    found = Advice()
    cores, quota = fleet.machine(config)
    usable = min(len(cores), quota or len(cores))
    if usable < 2:
        found.findings.append(good(SUBJECT, "one core: one colocated worker; there is nothing to divide into pools"))
        return found
    if gpus:
        found.findings.append(
            warning(
                SUBJECT,
                "the simulation knows steps on CPUs only; workers here compute on GPUs",
                "measure it: tandem bench compare",
            )
        )
        return found
    model = smollm2.resolved(config.model) or str(path())
    seen = preview(model, config.revision, config.trust_remote_code)
    if not seen.local:
        found.findings.append(
            warning(SUBJECT, "the model is not downloaded, so its steps cannot be measured", "serve it once, then ask")
        )
        return found
    plan = plan_of(config, shape, usable, seen)
    predicted = predict(plan, console)
    found.findings += _findings(predicted, plan)
    found.figures = _figures(predicted, shape)
    return found


def plan_of(config: DoctorConfig, shape: WorkloadShape, cores: int, seen: Preview) -> BenchPlanConfig:
    """Return the plan for all cores: systems with as many workers as there are cores, at most MOST_WORKERS."""
    workers = min(cores, MOST_WORKERS)
    apart = [f"{prefill}p{workers - prefill}d" for prefill in range(1, workers)]
    most_seqs = min(config.max_num_seqs, 1 << 16)
    return BenchPlanConfig(
        model=config.model,
        systems=",".join([*apart, f"{workers}c"]),
        threads=config.threads or cores // workers,
        runs=ROUNDS,
        num_prompts=REQUESTS,
        random_input_len=shape.prompt_tokens,
        random_output_len=shape.output_tokens,
        request_rate=shape.rate,
        goodput=config.goodput,
        cost=config.cost,
        num_kv_blocks=_blocks(config, workers, seen),
        block_size=config.block_size,
        max_num_seqs=most_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens or 512, most_seqs),
        lend_cores=config.lend_cores,
    )


def _blocks(config: DoctorConfig, workers: int, seen: Preview) -> int:
    """Return the KV blocks of each of ``workers`` workers, as they would be started here."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if (layers := seen.checkpoint.kv_layers()) is None:
        raise StartError(
            "the simulation does not know this model's KV",
            "its configuration does not give the shape of keys and values",
            "give --num-kv-blocks",
        )
    dtype, _ = choose_dtype(config.dtype, seen.dtype, probe_cpu())
    layout = KvLayout(layers, "fp8" if config.kv_cache_dtype == "fp8" else dtype, config.block_size)
    return max(1, kv_bytes(config, workers) // layout.block_bytes)


def _findings(predicted: Prediction, plan: BenchPlanConfig) -> Iterator[Finding]:
    best = recommended(predicted.outcomes)
    for number, line in enumerate(predicted.advice):
        if best is None and number == 0:
            yield warning(SUBJECT, line, "a lower rate, milder objectives (--goodput), or more cores")
        else:
            yield good(SUBJECT, line)
    yield good(SUBJECT, f"simulated: {plan.systems}, {plan.threads} thread(s) per worker, {REQUESTS} requests")
    yield good(SUBJECT, f"assumed, not measured: {'; '.join(predicted.assumptions)}")


def _figures(predicted: Prediction, shape: WorkloadShape) -> dict[str, Any]:
    """Return the prediction as JSON."""
    best = recommended(predicted.outcomes)
    return {
        **shape._asdict(),
        "objectives_ms": {each.metric: each.bound for each in predicted.objectives},
        "disaggregate": None if best is None else best.disaggregated,
        "pools": None if best is None else best.system,
        "systems": {each.system: {name: each.figure(name).median for name in FIGURES} for each in predicted.outcomes},
        "assumed": predicted.assumed,
        "cost": predicted.origin | predicted.cost.as_json(),
        "advice": predicted.advice,
    }
