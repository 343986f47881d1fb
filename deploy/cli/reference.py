"""The pages of docs/reference, written from the code: flags, HTTP API and metrics.

``python -m deploy.cli.reference`` rewrites them, and so does ``make docs``. A test fails while a page differs from the
code.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from aiohttp import web
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry

from common.config.options import GROUPS, Option, options
from coordinator.api import (
    anthropic,
    anthropic_content,
    chat_messages,
    openai,
    reasoning,
    responses,
    responses_items,
    single_answer,
    structured,
    tools,
    unsupported,
)
from coordinator.api.scopes import PATHS, SCOPES
from coordinator.api.unsupported import UNSUPPORTED
from coordinator.cluster.registry import Registry
from coordinator.http import admin, pages, routes, ui_files
from coordinator.http import anthropic as messages_routes
from coordinator.http import responses as responses_routes
from coordinator.metrics import Metrics
from deploy.cli.commands import COMMANDS, CONFIG_HELP, CONFIGS
from deploy.cli.field_help import FIELD_HELP, MESSAGES_HELP, RESPONSES_HELP, TEXT_HELP
from deploy.cli.openapi import Body, openapi

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
OPENAPI = ROOT / "coordinator" / "http" / "openapi.json"
NOTE = "<!-- Written by `python -m deploy.cli.reference`; do not edit. -->"


def write() -> None:
    """Rewrite every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in reference_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    OPENAPI.write_text(openapi_text(), encoding="utf-8")


def reference_pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {"flags.md": flags_page(), "http-api.md": http_page(), "metrics.md": metrics_page()}


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", NOTE, *parts)) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


# -- flags ------------------------------------------------------------------------------------------------------------


def flags_page() -> str:
    """All commands, and one table of flags per group."""
    helps = {**{name: command.help for name, command in COMMANDS.items()}, "config": CONFIG_HELP}
    commands = _table(("command", "what it does"), ((f"`tandem {name}`", help) for name, help in helps.items()))
    return _page(
        "Commands and flags",
        "Each flag is also an environment variable (`--max-model-len` is `TANDEM_MAX_MODEL_LEN`) and a key of the YAML "
        "file that `--config` or `TANDEM_CONFIG` names. A flag wins over the environment, the environment over the "
        "file, the file over the default. `tandem config COMMAND [FLAGS]` prints each value and its source. Sizes and "
        "counts take suffixes: `4GiB`, `4GB`, `32K` (32,768), `32k` (32,000). A switch such as "
        "`--enable-prefix-caching` is turned off by `--no-enable-prefix-caching`.",
        commands,
        *(part for group in GROUPS if (part := _flag_group(group))),
    )


def _flag_group(group: str) -> str:
    """A heading and one row per flag and meaning; the same flag may mean different things to different commands."""
    rows: dict[tuple[str, str, str], tuple[Option, list[str]]] = {}
    for config in CONFIGS:
        names = [name for name, command in COMMANDS.items() if command.config is config]
        for item in options(config):
            if item.group == group:
                rows.setdefault((item.name, item.help, item.default_text), (item, []))[1].extend(names)
    if not rows:
        return ""
    cells = (
        (", ".join(f"`{flag}`" for flag in (item.flag, *item.aliases)), item.default_text, ", ".join(names), item.help)
        for item, names in rows.values()
    )
    return f"## {group.capitalize()}\n\n" + _table(("flag", "default", "commands", "what it does"), cells)


# -- HTTP -------------------------------------------------------------------------------------------------------------

_GETTERS = {
    "boolean": "boolean",
    "string": "string",
    "choice": "string",
    "integer": "integer",
    "tokens": "integer",
    "number": "number",
    "mapping": "object",
    "nested": "object",
    "array": "array",
    "raw": "any",
    "skip": "any",
}
"""Methods of :class:`coordinator.api.fields.Fields` and the JSON types that they read."""


def http_page() -> str:
    """Endpoints, request fields, refused fields and error codes."""
    refused = {name: text.format(name=name) for name, text in UNSUPPORTED.items()}
    everywhere = tuple(PATHS)
    scopes = ((f"`{name}`", *("yes" if api in row.obeyed else "refused" for api in everywhere))
              for name, row in sorted(SCOPES.items()))  # fmt: skip
    chat, text = request_fields(openai.parse_chat), request_fields(openai.parse_completion)
    both = dict(chat.items() & text.items())
    return _page(
        "HTTP API",
        "The API is OpenAI's, with vLLM's additional fields. A field that the server does not know is ignored and "
        "named in the response header `x-tandem-ignored`, or refused with `--strict-params`; a field that it knows and "
        "cannot honour gets status 400.",
        "## Endpoints",
        _table(("endpoint", "what it does"), endpoints()),
        "## Fields of chat and text completions",
        _field_table(both),
        "## Fields of chat completions only",
        _field_table({name: kind for name, kind in chat.items() if name not in both}),
        "## Fields of text completions only",
        _field_table({name: kind for name, kind in text.items() if name not in both}, TEXT_HELP),
        "## Fields of the Responses API",
        *_other_fields(responses_fields(), RESPONSES_HELP, responses.UNSUPPORTED),
        "## Fields of the Messages API",
        *_other_fields(messages_fields(), MESSAGES_HELP, anthropic.UNSUPPORTED),
        "## Fields that some endpoints obey",
        "The others refuse them with the code `unsupported`.",
        _table(("field", *(f"`{PATHS[api]}`" for api in everywhere)), scopes),
        "## Refused fields",
        _table(("field", "answer"), ((f"`{name}`", answer) for name, answer in sorted(refused.items()))),
        "## Response headers",
        _table(("header", "value"), RESPONSE_HEADERS),
        "## Errors",
        'An error has OpenAI\'s form: `{"error": {"message", "type", "param", "code"}}`. On the paths of the Messages '
        'API it has Anthropic\'s: `{"type": "error", "error": {"type", "message"}, "request_id"}`. In a stream that '
        "has begun it is the last event. Answers with 429 and 503 carry `Retry-After`.",
        _table(
            ("status", "code", "cause"),
            ((str(status), f"`{code}`", _error_help(status, code)) for status, code in error_codes()),
        ),
    )


ERROR_HELP = {
    "cannot_scale": "The server was not started by `tandem up`, or is scaling already.",
    "context_length_exceeded": "Prompt and output do not fit into the context length, or into any worker.",
    "duplicate_key": "A key occurs twice in one JSON object.",
    "forbidden_origin": "A web page of another site sent the request; see `--allowed-origins`.",
    "grammar_compiler_unavailable": "The process that compiles grammars could not be started.",
    "grammar_too_complex": "A schema, expression or grammar takes too much time or memory, or is too large.",
    "insufficient_permissions": "The key is not the one for `/admin`.",
    "internal_error": "A fault of the server; its log has the traceback under the request id.",
    "invalid_api_key": "The key is missing or wrong.",
    "invalid_json": "The body is not a JSON object in UTF-8, or nested too deeply.",
    "invalid_messages": "The chat template refuses these messages.",
    "invalid_type": "A field has the wrong JSON type.",
    "invalid_value": "A field is out of its range.",
    "malformed_request": "Not a valid HTTP request.",
    "method_not_allowed": "The path exists, but not for this method; see the header `Allow`.",
    "missing_required_parameter": "A required field is missing.",
    "model_not_found": "This server serves another model.",
    "no_*_workers": "No worker of this role is ready.",
    "no_chat_template": "The model has no chat template; use `/v1/completions` or `--chat-template`.",
    "not_found": "There is no such path, worker or request.",
    "not_ready": "`/ready` only: a request could not be served now, or a configured worker has not joined yet.",
    "request_quarantined": "Two workers died while they served this request; it is not tried again.",
    "request_timeout": "The request was not finished within `--request-timeout`.",
    "request_too_large": "The body is larger than `--max-body-bytes`.",
    "server_is_overloaded": "A queue is full; `Retry-After` says when a place is expected.",
    "server_shutting_down": "The server drains.",
    "too_many_listeners": "As many clients as are served follow `/admin/events` already.",
    "unsupported": "A known field that this server cannot honour.",
    "unsupported_content_encoding": "Compressed bodies are not read.",
    "unsupported_expectation": "Only `Expect: 100-continue` is understood.",
    "worker_lost": "Workers were lost and the retries are spent.",
}
"""One line per error code."""

_LATE_BODY = "The body of the request did not arrive within `--client-timeout`."


def _error_help(status: int, code: str) -> str:
    return _LATE_BODY if (status, code) == (408, "request_timeout") else ERROR_HELP[code]


RESPONSE_HEADERS = (
    ("`x-request-id`", "The client's own `X-Request-Id`, or a new id."),
    ("`x-tandem-path`", "`disagg`; `local`: prefilled by decode; `prefill`: ended at its first token; `colocated`."),
    ("`x-tandem-prefill`, `x-tandem-decode`", "Names of the workers."),
    (
        "`x-tandem-tools`",
        "`unparsed`: how the model writes tool calls is not known, so they stay in the content. `unconstrained`: calls "
        "are read, but may break the tool's schema.",
    ),
    (
        "`x-tandem-ignored`",
        "Fields of the body that the server does not know or that have no effect, and keywords of tools' schemas "
        "that are left out.",
    ),
    (
        "`traceparent`, `tracestate`",
        "The trace of the request and its server span, if the client sent a `traceparent` or traces are exported.",
    ),
    ("`Retry-After`", "Seconds until a place is expected, with 429 and 503."),
)  # fmt: skip


def endpoints() -> list[tuple[str, str]]:
    """Each route of the application with the first sentence of its handler's docstring."""
    return [(f"`{route.method} {route.path.replace(':.+', '')}`", words) for route, words in _routes()]


def _routes() -> list[tuple[web.RouteDef, str]]:
    """Each route with the first paragraph of its handler's docstring."""
    found = []
    tables = (routes, responses_routes, messages_routes, pages, admin, ui_files)
    for route in (route for table in tables for route in table.routes):
        assert isinstance(route, web.RouteDef)
        text = inspect.getdoc(route.handler)
        if not text:
            raise ValueError(f"the handler of {route.method} {route.path} has no docstring")
        found.append((route, " ".join(text.partition("\n\n")[0].replace("``", "`").split())))
    return found


def openapi_text() -> str:
    """The OpenAPI description that the server sends, as JSON."""
    responses_body = Body(responses_fields(), ("input",), FIELD_HELP | RESPONSES_HELP)
    messages_body = Body(messages_fields(), ("model", "messages", "max_tokens"), FIELD_HELP | MESSAGES_HELP)
    to_tokens = {
        **dict.fromkeys(("prompt", "model", "reasoning_effort"), "string"),
        **dict.fromkeys(("messages", "tools", "documents"), "array"),
        **dict.fromkeys(("add_special_tokens", "return_token_strs", "add_generation_prompt"), "boolean"),
    }
    bodies = {
        "/v1/chat/completions": Body(request_fields(openai.parse_chat), ("messages",), FIELD_HELP),
        "/v1/completions": Body(request_fields(openai.parse_completion), ("prompt",), TEXT_HELP),
        "/v1/responses": responses_body,
        "/v1/responses/input_tokens": responses_body,
        "/v1/messages": messages_body,
        "/v1/messages/count_tokens": messages_body._replace(required=("model", "messages")),
        "/admin/drain": Body({"worker": "string", "timeout": "number"}, ("worker",)),
        "/admin/scale": Body({"prefill": "integer", "decode": "integer"}, either=("prefill", "decode")),
    }
    for prefix in ("", "/v1"):
        bodies[f"{prefix}/tokenize"] = Body(to_tokens, (), FIELD_HELP, ("prompt", "messages"))
        bodies[f"{prefix}/detokenize"] = Body({"tokens": "array", "model": "string"}, ("tokens",), FIELD_HELP)
    written = openapi(_routes(), bodies)
    return json.dumps(written, indent=1) + "\n"


def _field_table(fields: Mapping[str, str], helps: Mapping[str, str] = FIELD_HELP) -> str:
    rows = ((f"`{name}`", kind, helps[name]) for name, kind in sorted(fields.items()) if name in helps)
    return _table(("field", "type", "meaning"), rows)


def _other_fields(fields: Mapping[str, str], helps: Mapping[str, str], refused: Mapping[str, str]) -> list[str]:
    """A table of the fields in ``helps``, the names of the others, and a table of refused fields."""
    others = ", ".join(f"`{name}`" for name in sorted(fields) if name not in helps)
    return [
        _field_table(fields, helps),
        f"These mean the same as in chat completions: {others}.",
        _table(("refused field", "answer"), ((f"`{name}`", answer) for name, answer in sorted(refused.items()))),
    ]


def request_fields(
    parse: Callable[..., object],
    modules: Sequence[ModuleType] = (openai, chat_messages, reasoning, structured, tools, unsupported),
) -> dict[str, str]:
    """The fields that ``parse`` reads from a request body, with their types and ranges, found in its source.
    ``modules``: those with the functions that it calls; of two with the same name the later one counts."""
    functions = {
        node.name: node
        for module in modules
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.FunctionDef)
    }
    found: dict[str, str] = {}
    for name, kind in _fields_read(parse.__name__, "", functions, vars(openai)):
        if kind != "any" or name not in found:  # a field may be read again where its type is known
            found[name] = kind
    return found


def responses_fields() -> dict[str, str]:
    """The fields of POST /v1/responses."""
    modules = (responses, responses_items, single_answer, openai, reasoning, tools)
    return request_fields(responses.parse_responses, modules)


def messages_fields() -> dict[str, str]:
    """The fields of POST /v1/messages."""
    return request_fields(anthropic.parse_messages, (openai, reasoning, single_answer, anthropic_content, anthropic))


def _fields_read(
    function: str, path: str, functions: Mapping[str, ast.FunctionDef], names: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Every ``fields.getter("name", ...)`` in ``function`` and in the functions that it gives ``fields`` to."""
    nested = {"fields": path}
    for node in ast.walk(functions[function]):
        if isinstance(node, ast.Assign | ast.NamedExpr) and (name := _nested_name(node.value)) is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                nested[target.id] = f"{path}{name}."
    for node in ast.walk(functions[function]):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(ast.Name(owner), getter) if owner in nested and getter in _GETTERS:
                for argument in node.args if getter == "skip" else node.args[:1]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield f"{nested[owner]}{argument.value}", _type(getter, node, names)
            case ast.Name(called) if called in functions and any(
                isinstance(argument, ast.Name) and argument.id == "fields" for argument in node.args
            ):
                yield from _fields_read(called, path, functions, names)
            case _:
                pass


def _nested_name(value: ast.expr) -> str | None:
    match value:
        case ast.Call(ast.Attribute(ast.Name("fields"), "nested"), [ast.Constant(str(name)), *_]):
            return name
    return None


def _type(getter: str, call: ast.Call, names: Mapping[str, Any]) -> str:
    """The JSON type, with the range where the getter is given one that a reader can use."""
    kind = _GETTERS[getter]
    if getter not in ("integer", "number"):
        return kind
    low, high = (eval(ast.unparse(bound), dict(names)) for bound in call.args[1:3])  # noqa: S307 (our own source)
    if high < 1 << 31:
        return f"{kind}, {low:,} to {high:,}"
    return f"{kind}, at least {low:,}" if low >= 0 else kind


def error_codes() -> list[tuple[int, str]]:
    """Status and code of every RequestError that the coordinator can raise, found in its source."""
    found: set[tuple[int, str]] = set()
    for file in sorted((ROOT / "coordinator").glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.update(_codes(node.func.id, node))
    return sorted(found)


def _codes(called: str, call: ast.Call) -> Iterator[tuple[int, str]]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if called == "RequestError":
        status, code = keywords.get("status"), keywords.get("code")
    elif called == "refuse":
        status, code = None, call.args[2] if len(call.args) > 2 else keywords.get("code", ast.Constant("invalid_value"))
    else:
        return
    number = status.value if isinstance(status, ast.Constant) else 400
    match code:
        case ast.Constant(str(text)):
            yield int(str(number)), text
        case ast.JoinedStr(parts):
            yield (
                int(str(number)),
                "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts),
            )


# -- metrics ----------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Every family of ``GET /metrics``."""
    metrics = Metrics("model", Registry(None))
    rows = sorted(_metric_row(family, metrics.registry) for family in metrics.registry.collect())
    return _page(
        "Metrics",
        "`GET /metrics` answers in Prometheus' text format. Metrics that vLLM has too carry vLLM's name (`vllm:…`) and "
        "meaning; others begin with `tandem_`. Times are in seconds.",
        _table(("metric", "type", "labels", "meaning"), rows),
    )


def _metric_row(family: Metric, registry: CollectorRegistry) -> tuple[str, str, str, str]:
    # A labelled counter without a sample shows its labels nowhere else.
    owner = family if hasattr(family, "_labelnames") else registry._names_to_collectors[family.name]
    labels = ", ".join(f"`{label}`" for label in getattr(owner, "_labelnames", ()))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return f"`{name}`", family.type, labels, family.documentation


if __name__ == "__main__":
    write()
