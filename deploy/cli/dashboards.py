"""The Grafana dashboards of deploy/grafana/dashboards, written from the panels below.

``python -m deploy.cli.dashboards`` rewrites them, and so does ``make docs``. A test fails while a file differs from the
code. One dashboard answers one question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Json = dict[str, object]
Kind = Literal["timeseries", "stat", "table"]

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
WIDTH = 24
"""Columns of Grafana's grid."""
CHOSEN = 'instance=~"$instance"'
"""The matcher of every selector: the coordinators that the reader has chosen."""
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression of a panel, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. ``unit`` is one of Grafana's names; ``red`` the value from which a number is red."""

    title: str
    about: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    red: float | None = None
    red_below: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: the name of its file, which is also its address in Grafana, its title, and its panels."""

    name: str
    title: str
    about: str
    panels: Sequence[Panel] = field(default_factory=list)


# -- expressions ------------------------------------------------------------------------------------------------------


def pick(name: str, matchers: str = "") -> str:
    """Return a selector of the metric ``name`` of the chosen coordinators."""
    return f"{name}{{{CHOSEN}{', ' + matchers if matchers else ''}}}"


def rate(name: str, by: str = "", matchers: str = "") -> str:
    """Return the rate of the counter ``name``, summed, or summed by the labels ``by``."""
    return f"sum{f' by ({by})' if by else ''} (rate({pick(name, matchers)}[{RATE}]))"


def mean(name: str, by: str = "") -> str:
    """Return the mean of the histogram ``name`` over the last interval."""
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


def quantile(share: float, name: str, by: str = "", matchers: str = "") -> str:
    """Return a quantile of the histogram ``name`` over the last interval."""
    return f"histogram_quantile({share:g}, {rate(f'{name}_bucket', f'le, {by}' if by else 'le', matchers)})"


def tails(name: str) -> list[Query]:
    """Return the median and the tails of the histogram ``name``."""
    return [Query(quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)]


def or_zero(expr: str) -> str:
    """Return ``expr``, 0 where it has no series (what it counts has not happened yet)."""
    return f"{expr} or vector(0)"


READY = 'state="ready"'
HELD = 'state="held"'
FAILED = 'outcome="failed"'
EXPOSED = 'stage!="transfer"'
_SHARE_FAILED = f"{rate('tandem_requests_total', matchers=FAILED)} / {rate('tandem_requests_total')}"
_BUSY = f"{rate('tandem_worker_busy_seconds_total', 'role')} / count by (role) ({pick('tandem_worker_max_running')})"
_KEYS = "key_name"

# -- the dashboards ---------------------------------------------------------------------------------------------------

HEALTH = Dashboard(
    "tandem-health",
    "Tandem: is it healthy?",
    "Whether requests can be served, whether they are, and what goes wrong.",
    [
        Panel("Ready", "1 if a request could be served now, as GET /ready.",
              [Query(f"min({pick('tandem_ready')})")], kind="stat", width=4, red=1, red_below=True),
        Panel("Workers ready", "Ready workers, and how many should be running.",
              [Query(f"sum({pick('tandem_workers', READY)})", "ready"),
               Query(f"sum({pick('tandem_workers_expected')})", "expected")], kind="stat", width=5),
        Panel("Failed requests", "Share of requests that ended with an error.",
              [Query(_SHARE_FAILED)], unit="percentunit", kind="stat", width=5, red=0.02),
        Panel("Time to first token, p99", "From arrival to the first token.",
              [Query(quantile(0.99, "vllm:time_to_first_token_seconds"))], unit="s", kind="stat", width=5, red=5),
        Panel("Between tokens, p99", "Time between two tokens of a choice.",
              [Query(quantile(0.99, "vllm:inter_token_latency_seconds"))], unit="s", kind="stat", width=5, red=0.5),
        Panel("Requests by outcome", "Requests that ended, per second.",
              [Query(rate("tandem_requests_total", "outcome"), "{{outcome}}")], unit="reqps", stacked=True),
        Panel("Refusals and errors", "Responses with a status of 400 or more, per second; 499: the client left.",
              [Query(or_zero(rate("tandem_http_requests_total", "status", 'status=~"[45].."')), "{{status}}")],
              unit="reqps"),
        Panel("Requests waiting and running", "Requests in the coordinator's queue, and on workers.",
              [Query(f"sum({pick('vllm:num_requests_waiting')})", "waiting"),
               Query(f"sum({pick('vllm:num_requests_running')})", "running")]),
        Panel("Workers", "Workers by role and state.",
              [Query(f"sum by (role, state) ({pick('tandem_workers')})", "{{role}} {{state}}")], stacked=True),
        Panel("Faults that were survived", "Lost workers, and attempts lost with them, per second.",
              [Query(rate("tandem_workers_lost_total"), "workers lost"), Query(rate("tandem_retries_total"), "retries"),
               Query(rate("tandem_migrations_total"), "migrations")]),
        Panel("Hand-offs that failed", "Failed hand-offs per second, and circuit breakers that are not closed.",
              [Query(rate("tandem_kv_transfer_failures_total"), "failed"),
               Query(f"sum({pick('tandem_open_breakers')})", "open breakers")]),
        Panel("Defects and strangers", "Leaked KV blocks are a defect. Bad messages come from a defect or a stranger.",
              [Query(f"sum({pick('tandem_leaked_kv_blocks')})", "leaked blocks"),
               Query(rate("tandem_bad_messages_total"), "bad messages per second"),
               Query(f"sum({pick('tandem_cut_off_peers_total')})", "peers cut off")]),
        Panel("Lag of the coordinator's event loop", "A stall here delays every stream.",
              tails("tandem_event_loop_lag_seconds"), unit="s"),
        Panel("The coordinator's process", "CPU in cores, and open files as a share of the limit.",
              [Query(rate("process_cpu_seconds_total"), "CPU"),
               Query(f"max({pick('process_open_fds')} / {pick('process_max_fds')})", "open files")]),
        Panel("Memory of the processes", "Resident memory of the coordinator and of each worker.",
              [Query(pick("process_resident_memory_bytes"), "coordinator"),
               Query(pick("tandem_worker_process_resident_memory_bytes"), "{{worker}}")], unit="bytes"),
        Panel("GPUs in trouble", "Reasons that lower clocks, memory rows that could not be replaced, and Xid errors.",
              [Query(or_zero(f"sum by (reason) ({pick('tandem_gpu_throttled')} > 0)"), "{{reason}}"),
               Query(or_zero(f"sum({pick('tandem_gpu_row_remap_failed')})"), "rows not replaced"),
               Query(or_zero(f"sum({pick('tandem_gpu_xid_errors')})"), "Xid errors")]),
        Panel("Firing alerts", "Alerts of deploy/prometheus/alerts.yml; each has an entry in docs/operate/runbook.md.",
              [Query(or_zero('count by (alertname) (ALERTS{alertstate="firing", alertname=~"Tandem.+"})'),
                     "{{alertname}}")]),
    ],
)  # fmt: skip

LATENCY = Dashboard(
    "tandem-latency",
    "Tandem: where does time go?",
    "The latencies that clients see, and the stages of a request.",
    [
        Panel("Time to first token", "From arrival to the first token.",
              tails("vllm:time_to_first_token_seconds"), unit="s"),
        Panel("Between tokens", "Time between two tokens of a choice.",
              tails("vllm:inter_token_latency_seconds"), unit="s"),
        Panel("Whole requests", "From arrival to the last token.", tails("vllm:e2e_request_latency_seconds"), unit="s"),
        Panel("Stages before the first tokens, mean",
              "Tokenizing, waiting for a worker, prefill, the part of the hand-off that is not hidden behind prefill, "
              "and waiting for a step on decode.",
              [Query(f"{rate('tandem_stage_seconds_sum', 'stage', EXPOSED)} / "
                     f"{rate('tandem_stage_seconds_count', 'stage', EXPOSED)}", "{{stage}}")],
              unit="s", width=12, stacked=True),
        Panel("Stages, p99", "The tail of each stage; transfer includes the part behind prefill.",
              [Query(quantile(0.99, "tandem_stage_seconds", "stage"), "{{stage}}")], unit="s", width=12),
        Panel("Waiting for a worker", "Time in the coordinator's queue and in a worker's.",
              tails("vllm:request_queue_time_seconds"), unit="s"),
        Panel("Prefill", "Time computing the prompt.", tails("vllm:request_prefill_time_seconds"), unit="s"),
        Panel("Decode", "From the first to the last token.", tails("vllm:request_decode_time_seconds"), unit="s"),
        Panel("Hand-offs", "Duration of KV hand-offs, hidden or not.", tails("tandem_kv_transfer_seconds"), unit="s"),
        Panel("KV sent", "Bytes of hand-offs per second, by link.",
              [Query(or_zero(rate("tandem_kv_transfer_bytes_total", "transport")), "{{transport}}")], unit="Bps"),
        Panel("Prompt tokens found in a prefix cache", "Share of the tokens that workers looked up.",
              [Query(f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}")],
              unit="percentunit", most=1),
        Panel("Tokens in a step", "Size of the steps of all workers.", tails("vllm:iteration_tokens_total")),
        Panel("Mean duration of a step", "By worker; a stream waits at least this long for its next token.",
              [Query(f"{rate('tandem_worker_busy_seconds_total', 'worker')} / "
                     f"{rate('tandem_worker_steps_total', 'worker')}", "{{worker}}")], unit="s"),
        Panel("Time per output token", "Mean over each request, after its first token.",
              tails("vllm:request_time_per_output_token_seconds"), unit="s"),
    ],
)  # fmt: skip

POOLS = Dashboard(
    "tandem-pools",
    "Tandem: is the pool ratio right?",
    "How busy each pool is, and which one requests wait for.",
    [
        Panel("Busy workers", "Share of time in which the workers of a role compute. One role at 1 while the other "
              "idles: move a worker.", [Query(_BUSY, "{{role}}")], unit="percentunit", width=12, most=1),
        Panel("Full batches", "Sequences in the batches of a role, as a share of what fits.",
              [Query(f"sum by (role) ({pick('tandem_worker_running')}) / "
                     f"sum by (role) ({pick('tandem_worker_max_running')})", "{{role}}")],
              unit="percentunit", width=12, most=1),
        Panel("Prompt tokens that wait", "In the coordinator's queue, and on workers by role.",
              [Query(f"sum({pick('tandem_waiting_tokens')})", "queue"),
               Query(f"sum by (role) ({pick('tandem_worker_waiting_tokens')})", "{{role}}")]),
        Panel("Sequences that wait on workers", "By role; on decode, hand-offs that wait for blocks are included.",
              [Query(f"sum by (role) ({pick('tandem_worker_waiting')})", "{{role}}")]),
        Panel("Requests waiting in the coordinator", "They have not been placed on workers.",
              [Query(f"sum({pick('vllm:num_requests_waiting')})", "waiting")]),
        Panel("KV blocks in use", "By role, as a share of the pool, without cached blocks, which can be evicted.",
              [Query(f"sum by (role) ({pick('tandem_kv_blocks', HELD)}) / "
                     f"sum by (role) ({pick('tandem_kv_blocks')})", "{{role}}")], unit="percentunit", most=1),
        Panel("Preempted sequences", "Per second; decode had too few blocks.",
              [Query(rate("vllm:num_preemptions_total"), "preempted")]),
        Panel("Wait for decode after the hand-off, p99", "Grows when decode workers are full.",
              [Query(quantile(0.99, "tandem_stage_seconds", matchers='stage="decode_wait"'), "decode_wait")], unit="s"),
        Panel("Tokens per second", "Prompt tokens load prefill, output tokens load decode.",
              [Query(rate("vllm:prompt_tokens_total"), "prompt"),
               Query(rate("vllm:generation_tokens_total"), "output")]),
        Panel("Paths of requests", "local: a decode worker computed the prompt, since prefill would have taken longer.",
              [Query(rate("tandem_requests_total", "path"), "{{path}}")], unit="reqps", stacked=True),
        Panel("Ready workers", "By role.",
              [Query(f"sum by (role) ({pick('tandem_workers', READY)})", "{{role}}")]),
        Panel("Busy share of each worker", "Workers of one role should be alike.",
              [Query(rate("tandem_worker_busy_seconds_total", "worker"), "{{worker}}")], unit="percentunit", most=1),
        Panel("CPU of each worker", "In cores.",
              [Query(rate("tandem_worker_process_cpu_seconds_total", "worker"), "{{worker}}")]),
        Panel("Cores lent", "Cores of idle workers that others compute on.",
              [Query(rate("tandem_borrowed_core_seconds_total"), "lent")]),
        Panel("GPU utilization", "Share of time with a running kernel, by worker.",
              [Query(or_zero(f"avg by (worker) ({pick('tandem_gpu_utilization_ratio')})"), "{{worker}}")],
              unit="percentunit", most=1),
        Panel("GPU memory in use", "By worker.",
              [Query(or_zero(f"sum by (worker) ({pick('tandem_gpu_memory_used_bytes')})"), "{{worker}}")],
              unit="bytes"),
    ],
)  # fmt: skip


def _total(name: str, by: str) -> str:
    return f"sum by ({by}) (increase({pick(name)}[$__range]))"


USAGE = Dashboard(
    "tandem-usage",
    "Tandem: who uses it?",
    "Use by API key (docs/operate/metrics.md says how keys are named), by endpoint, and the shape of requests.",
    [
        Panel("Requests by key", "Per second.", [Query(rate("tandem_key_requests_total", _KEYS), "{{key_name}}")],
              unit="reqps", stacked=True),
        Panel("Prompt tokens by key", "Per second, cached ones included.",
              [Query(rate("tandem_key_prompt_tokens_total", _KEYS), "{{key_name}}")], stacked=True),
        Panel("Output tokens by key", "Per second, counted when a request ends.",
              [Query(rate("tandem_key_output_tokens_total", _KEYS), "{{key_name}}")], stacked=True),
        Panel("Requests in this period", "By key and outcome.",
              [Query(_total("tandem_key_requests_total", f"{_KEYS}, outcome"))], kind="table", width=12),
        Panel("Output tokens in this period", "By key.",
              [Query(_total("tandem_key_output_tokens_total", _KEYS))], kind="table", width=12),
        Panel("Cached share of prompts by key", "Prompt tokens found in a prefix cache.",
              [Query(f"{rate('tandem_key_cached_tokens_total', _KEYS)} / "
                     f"{rate('tandem_key_prompt_tokens_total', _KEYS)}", "{{key_name}}")], unit="percentunit", most=1),
        Panel("Failed and aborted requests by key", "Per second; aborted: the client left, or had enough.",
              [Query(or_zero(rate("tandem_key_requests_total", f"{_KEYS}, outcome", 'outcome!="done"')),
                     "{{key_name}} {{outcome}}")], unit="reqps"),
        Panel("Requests by endpoint", "Per second.",
              [Query(rate("tandem_http_requests_total", "endpoint", 'endpoint!~"/health|/ready|/ping|/metrics"'),
                     "{{endpoint}}")], unit="reqps", stacked=True),
        Panel("Refused requests by endpoint", "Per second, by status: 401 no key, 429 too many, 503 no worker.",
              [Query(or_zero(rate("tandem_http_requests_total", "endpoint, status", 'status=~"4..|503"')),
                     "{{endpoint}} {{status}}")], unit="reqps"),
        Panel("How answers end", "Choices per second, by finish reason.",
              [Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")], stacked=True),
        Panel("Prompt tokens of a request", "", tails("vllm:request_prompt_tokens")),
        Panel("Output tokens of a request", "All choices.", tails("vllm:request_generation_tokens")),
        Panel("Output tokens that requests allow", "max_tokens, or what fitted if the request set none.",
              tails("vllm:request_params_max_tokens")),
        Panel("Choices of a request", "Mean of n.", [Query(mean("vllm:request_params_n"), "n")]),
    ],
)  # fmt: skip

DASHBOARDS = (HEALTH, LATENCY, POOLS, USAGE)

# -- Grafana's JSON ---------------------------------------------------------------------------------------------------

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def files() -> dict[str, str]:
    """Return the text of each file of FOLDER by its name."""
    return {f"{each.name}.json": json.dumps(encoded(each), indent=1) + "\n" for each in DASHBOARDS}


def write() -> None:
    """Rewrite every dashboard."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def encoded(dashboard: Dashboard) -> Json:
    """Return ``dashboard`` as Grafana reads it."""
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["tandem"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["tandem"], "title": "Tandem", "asDropdown": False,
                   "includeVars": True, "keepTime": True}],
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), _instance()]},
        "panels": _placed(dashboard.panels),
    }  # fmt: skip


def _datasource() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instance() -> Json:
    query = "label_values(tandem_ready, instance)"
    return {
        "name": "instance",
        "label": "Coordinator",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "instance"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _placed(panels: Sequence[Panel]) -> list[Json]:
    """Return the panels in rows, from left to right; a row is as high as its highest panel."""
    placed: list[Json] = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, row_height = 0, y + row_height, 0
        row_height = max(row_height, panel.height)
        placed.append(_panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}})
        x += panel.width
    return placed


def _panel(panel: Panel, number: int) -> Json:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": panel.kind == "table",
            "range": panel.kind != "table",
            "format": "table" if panel.kind == "table" else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]
    shown: Json = {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }
    if panel.kind == "table":
        hidden = {"Time": True}
        shown["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden, "renameByName": {}}}]
    return shown


def _defaults(panel: Panel) -> Json:
    """Return Grafana's settings of a panel's fields: unit, bounds, colours and the style of lines."""
    good, bad = ("red", "green") if panel.red_below else ("green", "red")
    steps: list[Json] = [{"color": good, "value": None}]
    if panel.red is not None:
        steps.append({"color": bad, "value": panel.red})
    defaults: Json = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 25 if panel.stacked else 5, "stacking": stacking}
    return defaults


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    if panel.kind == "table":
        return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


if __name__ == "__main__":
    write()
