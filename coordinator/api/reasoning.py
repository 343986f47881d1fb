"""Validates the fields about reasoning and the variables of the chat template, which the chat APIs share.

Owns the names that other servers have for the same thing. Must not know what a template does with a variable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.core.request import MAX_TOKENS
from coordinator.api.fields import Fields, refuse
from coordinator.requests.spec import Json

KINDS = ("enabled", "adaptive", "disabled")
"""Values of ``thinking.type``."""
_RESERVED_KWARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "messages",
    "self",
    "tokenize",
    "tools",
)


@dataclass(frozen=True, slots=True)
class Bound:
    """The longest reasoning in tokens, None if it is not limited, and the path of the field that says so."""

    tokens: int | None = None
    param: str = "max_reasoning_tokens"


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the fields ``thinking`` and ``enable_thinking`` ask for: variables of the template, a bound, and the names
    of members that have no effect."""

    variables: Json = field(default_factory=dict)
    bound: Bound = Bound()
    ignored: tuple[str, ...] = ()


def parse_thinking(fields: Fields) -> Thinking:
    """Return what the fields ask for with which other servers turn reasoning on or off: ``enable_thinking``, and
    ``thinking``, a boolean or an object with ``type`` and ``budget_tokens``. Raises RequestError if they contradict
    each other."""
    wanted, bound, ignored = set[bool](), Bound(), list[str]()
    if fields.has("enable_thinking"):
        wanted.add(fields.boolean("enable_thinking", False))
    if isinstance(fields.raw("thinking"), dict):
        thinking = fields.nested("thinking")
        assert thinking is not None
        kind = thinking.choice("type", KINDS) or thinking.missing("type")
        wanted.add(kind != "disabled")
        bound = Bound(thinking.integer("budget_tokens", 1, MAX_TOKENS), thinking.at("budget_tokens"))
        ignored = [thinking.at(name) for name in thinking.ignored()]
    elif fields.has("thinking"):
        wanted.add(fields.boolean("thinking", False))
    if len(wanted) > 1:
        refuse("'thinking' and 'enable_thinking' contradict each other.", "enable_thinking")
    return Thinking({name: on for on in wanted for name in ("enable_thinking", "thinking")}, bound, tuple(ignored))


def parse_bound(fields: Fields, given: Bound) -> Bound:
    """Return the bound on reasoning: ``given`` or one of the fields that state it. Raises RequestError if there are
    several."""
    bounds = (
        given,
        Bound(fields.tokens("max_reasoning_tokens", 0), "max_reasoning_tokens"),
        Bound(fields.tokens("thinking_token_budget", 0), "thinking_token_budget"),
        Bound(fields.tokens("thinking_budget", 0), "thinking_budget"),
    )
    stated = [bound for bound in bounds if bound.tokens is not None]
    if len(stated) > 1:
        refuse(f"{stated[0].param!r} and {stated[1].param!r} mean the same: send one of them.", stated[1].param)
    return stated[0] if stated else Bound()


def template_variables(given: Json | None, effort: str | None, thinking: Json | None = None) -> Json:
    """Return the variables for the chat template: those in the field ``chat_template_kwargs``, and those for the
    reasoning effort and in ``thinking`` unless they are given. Raises RequestError for a reserved name."""
    kwargs = dict(given or {})
    for name in kwargs:
        if name in _RESERVED_KWARGS or name.startswith("_"):
            refuse(
                f"'chat_template_kwargs' must not set {name[:64]!r}: this name is reserved.",
                f"chat_template_kwargs.{name[:64]}",
            )
    for name, value in (thinking or {}).items():
        kwargs.setdefault(name, value)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":  # templates that only know whether to reason, under either name
            kwargs.setdefault("enable_thinking", False)
            kwargs.setdefault("thinking", False)
    return kwargs
