"""The fields with which clients constrain the output: ``response_format`` of OpenAI, ``structured_outputs`` of vLLM and
its older ``guided_*`` fields.

Parses them into one :class:`~coordinator.requests.spec.Constraint`. Checks types and sizes only: whether a schema or an
expression can be obeyed is found out by :mod:`coordinator.grammar`, off the event loop.
"""

from __future__ import annotations

from common.core.request import MAX_GRAMMAR
from coordinator.api.fields import Fields, refuse, wrong_type
from coordinator.requests.spec import Constraint, ConstraintKind

MAX_CHOICE_STRINGS = 4096
MAX_WHITESPACE_CHARS = 256
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_KINDS: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json",
    "structural_tag": "structural_tag",
}
"""The fields of ``structured_outputs`` of which a request has one."""
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")


def parse_constraint(fields: Fields) -> Constraint | None:
    """Return the constraint of a request, None if it has none. Raises RequestError if it has several."""
    form = fields.nested("response_format")
    given = (None if form is None else format_constraint(form), _structured_outputs(fields), *_guided(fields))
    found = [each for each in given if each is not None]
    if len(found) > 1:
        names = " and ".join(repr(each.param) for each in found)
        refuse(f"Only one of {names} is allowed: the output has one constraint.", found[1].param)
    return found[0] if found else None


def format_constraint(form: Fields) -> Constraint | None:
    """Return the constraint of ``response_format`` of chats, or of ``text.format`` of responses, which has the members
    of ``json_schema`` beside ``type``. None for plain text."""
    kind = form.choice("type", _FORMATS) or form.missing("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if form.has("schema"):  # as llama.cpp's server and others take it
            return Constraint(kind="json_schema", value=_schema(form, "schema"), param=form.at("schema"))
        return Constraint(kind="json", param=form.at("type"))
    if kind == "structural_tag":
        return Constraint(kind="structural_tag", value=form.values, param=form.path)
    return _json_schema(form)


def _json_schema(form: Fields) -> Constraint:
    inner = form.nested("json_schema")
    if inner is None:
        if not form.has("schema"):
            form.missing("json_schema")
        inner = form
    inner.string("name", limit=256)
    inner.string("description")
    strict = inner.boolean("strict", False)
    if not inner.has("schema"):
        if strict:
            inner.missing("schema")
        return Constraint(kind="json", param=form.at("json_schema"))
    return Constraint(kind="json_schema", value=_schema(inner, "schema"), param=inner.at("schema"), strict=strict)


def _structured_outputs(fields: Fields) -> Constraint | None:
    given = fields.nested("structured_outputs")
    if given is None:
        return None
    given.skip("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    names = [name for name in _KINDS if given.has(name) and given.raw(name) is not False]
    if len(names) != 1:
        found = f"it has {', '.join(names)}" if names else "it has none"
        refuse(f"'structured_outputs' must have exactly one of {', '.join(_KINDS)}; {found}.", "structured_outputs")
    whitespace = given.string("whitespace_pattern", limit=MAX_WHITESPACE_CHARS)
    if given.boolean("disable_any_whitespace", False) and whitespace is None:
        whitespace = ""
    closed = given.boolean("disable_additional_properties", False)
    constraint = _constraint(given, names[0], _KINDS[names[0]], whitespace, closed)
    if unknown := given.ignored():
        refuse(f"'structured_outputs' has no field {unknown[0][:64]!r}.", given.at(unknown[0][:64]), "unsupported")
    return constraint


def _guided(fields: Fields) -> list[Constraint]:
    fields.skip("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")
    names = [name for name in GUIDED if fields.has(name) and fields.raw(name) is not False]
    whitespace = fields.string("guided_whitespace_pattern", limit=MAX_WHITESPACE_CHARS)
    return [_constraint(fields, name, _KINDS[name.removeprefix("guided_")], whitespace) for name in names]


def _constraint(
    fields: Fields, name: str, kind: ConstraintKind, whitespace: str | None, closed: bool = False
) -> Constraint:
    value: object
    match kind:
        case "json":
            fields.boolean(name, False)
            value = None
        case "json_schema":
            value = _schema(fields, name)
        case "choice":
            value = _choices(fields, name)
        case "structural_tag":
            value = fields.raw(name)
            if not isinstance(value, str | dict):
                fields.wrong(name, "an object or JSON text", value)
        case _:
            value = fields.string(name, limit=MAX_GRAMMAR)
    return Constraint(kind=kind, value=value, param=fields.at(name), whitespace=whitespace, closed=closed)


def _schema(fields: Fields, name: str) -> object:
    value = fields.raw(name)
    if not isinstance(value, str | dict | bool):
        fields.wrong(name, "a JSON schema: an object, or JSON text", value)
    return value


def _choices(fields: Fields, name: str) -> list[str]:
    value = fields.array(name, MAX_CHOICE_STRINGS) or []
    if not value:
        refuse(f"{fields.at(name)!r} must have at least one string.", fields.at(name))
    choices: list[str] = []
    for index, each in enumerate(value):
        if not isinstance(each, str):
            wrong_type(f"{fields.at(name)}[{index}]", "a string", each)
        choices.append(each)
    return choices
