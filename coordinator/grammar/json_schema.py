"""JSON schemas of clients, rewritten for llguidance: everything that it would misread is resolved or refused.

llguidance reads draft 2020-12, but knows only references by JSON pointer, converts ``oneOf`` only where it sees that
the branches exclude each other, and reads its own options from the schema. :func:`prepared` returns a schema without
annotations and unknown keywords (which the standard ignores), with every reference resolved into ``$defs``, and with
``anyOf`` for each ``oneOf`` whose branches provably exclude each other. A keyword that constrains the output and that
llguidance does not implement is refused with its path: a constraint is obeyed or refused, never ignored. Nothing is
ever fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from coordinator.grammar.errors import TOO_COMPLEX, refuse, unsupported
from coordinator.grammar.string_formats import EXACT

Schema = dict[str, object]

MAX_DEPTH = 96
"""Maximum nesting of a schema. llguidance's own limit is 128 levels of intersection."""
_TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_ONE = frozenset({"additionalProperties", "additionalItems", "items"})
"""Keywords whose value is a schema."""
_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords whose value is an array of schemas."""
_NAMED = frozenset({"properties", "patternProperties"})
"""Keywords whose value is an object of schemas."""
_PLAIN = frozenset(
    {
        *("const", "enum", "required", "type", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minLength", "maxLength", "pattern", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
"""Keywords that are passed on as they are."""
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
"""Keywords whose value is a number of things, which may be written as 2.0."""
_UNSUPPORTED = frozenset(
    {
        *("not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that constrain values and that llguidance does not implement."""
_WITHOUT_EFFECT: Mapping[str, object] = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""Values with which an unsupported keyword allows everything."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of strings that are enforced."""
_OTHER_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    }
)
"""Formats of the standard that are not enforced. Any other name is an annotation."""


def prepared(schema: object, *, closed: bool = False, lenient: bool = False, at: str = "") -> Schema | bool:
    """Return ``schema`` rewritten for llguidance. ``closed``: objects have only the properties that they name unless
    ``additionalProperties`` says otherwise. ``at``: JSON pointer to the part that is meant. Raises GrammarError with
    the path of the keyword that cannot be obeyed; with ``lenient``, such keywords are left out."""
    return _Preparation(schema, closed, lenient).result(at)


def join(path: str, step: str | int) -> str:
    """Return ``path`` with one more step: ``.name`` or ``[index]``."""
    return f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}"


class _Preparation:
    """The rewriting of one schema document."""

    def __init__(self, root: object, closed: bool, lenient: bool) -> None:
        self._root, self._closed, self._lenient = root, closed, lenient
        self._base = str(root.get("$id", "")).rstrip("#") if isinstance(root, dict) else ""
        self._names: dict[str, str] = {}
        """References that were met -> their names in ``$defs``."""
        self._waiting: list[tuple[str, str, object]] = []
        """Targets that are not rewritten yet: (name, path, schema)."""

    def result(self, at: str = "") -> Schema | bool:
        """Return the schema at the JSON pointer ``at`` of the document."""
        if at:
            made: Schema | bool = {"$ref": self._reference(f"#{at}", at.replace("/", "."))}
        else:
            made = self._schema(self._root, "", 0)
        definitions: Schema = {}
        while self._waiting:
            name, path, target = self._waiting.pop()
            definitions[name] = self._schema(target, path, 1)
        if isinstance(made, dict) and definitions:
            made["$defs"] = definitions
        return made

    def _schema(self, schema: object, path: str, depth: int) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse("must be a schema: an object or a boolean.", path, "invalid_type")
        if depth > MAX_DEPTH:
            refuse(f"is nested deeper than {MAX_DEPTH} levels.", path, TOO_COMPLEX)
        if depth and isinstance(schema.get("$id"), str):
            unsupported("is not supported: only the whole schema may have an address.", f"{path}.$id")
        _check_type(schema, path)
        schema = _with_named_properties(schema)
        made: Schema = {}
        for keyword, value in schema.items():
            self._keyword(made, schema, keyword, value, join(path, keyword), depth + 1)
        if self._closed and "allOf" not in schema and ("properties" in made or schema.get("type") == "object"):
            made.setdefault("additionalProperties", False)
        return made

    def _keyword(self, made: Schema, schema: Schema, keyword: str, value: object, path: str, depth: int) -> None:
        """Add ``keyword`` of ``schema`` to ``made``."""
        if keyword in _PLAIN:
            made[keyword] = (
                int(value) if keyword in _COUNTS and isinstance(value, float) and value.is_integer() else value
            )
        elif keyword in _NAMED:
            made[keyword] = {name: self._schema(each, join(path, name), depth) for name, each in _object(value, path)}
        elif keyword in _MANY or (keyword == "items" and isinstance(value, list)):
            many: list[Schema | bool] = [
                self._schema(each, join(path, at), depth) for at, each in enumerate(_array(value, path))
            ]
            either = keyword == "oneOf" and (self._lenient or self._exclusive(schema, value))
            if either and "anyOf" in schema:
                made["allOf"] = [*_list(made.get("allOf")), {"anyOf": many}]
            elif keyword == "allOf":
                made["allOf"] = [*many, *_list(made.get("allOf"))]
            else:
                made["anyOf" if either else keyword] = many
        elif keyword in _ONE:
            made[keyword] = self._schema(value, path, depth)
        elif keyword == "$ref":
            made[keyword] = self._reference(value, path)
        elif keyword == "format":
            self._format(made, schema, value, path)
        elif keyword in _UNSUPPORTED and not self._lenient and _constrains(schema, keyword, value):
            unsupported(f"is not supported: structured output cannot obey the keyword {keyword!r}.", path)

    def _format(self, made: Schema, schema: Schema, value: object, path: str) -> None:
        kinds = schema.get("type", "string")
        if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
            return  # formats of other types, such as int32, are annotations
        if value in _OTHER_FORMATS and not self._lenient:
            unsupported(f"is not supported: structured output cannot obey the format {value!r}.", path)
        if isinstance(value, str) and value in EXACT and "pattern" not in schema:
            made["pattern"] = f"^({EXACT[value]})$"
        elif value in FORMATS:
            made["format"] = value

    # -- references -----------------------------------------------------------------------------------------------

    def _reference(self, reference: object, path: str) -> str:
        if not isinstance(reference, str):
            refuse("must be a string.", path, "invalid_type")
        local = reference.removeprefix(self._base) if self._base else reference
        if local in ("#", "#/", ""):
            return "#"
        if not local.startswith("#"):
            text = (
                f"refers to {reference[:200]!r}, which is outside of the schema and never fetched; put it into '$defs'."
            )
            unsupported(text, path)
        if local not in self._names:
            target = self._target(local, path)
            self._names[local] = name = str(len(self._names))
            self._waiting.append((name, local[1:].replace("/", ".") if local.startswith("#/") else path, target))
        return f"#/$defs/{self._names[local]}"

    def _target(self, local: str, path: str) -> object:
        """Return the schema at a JSON pointer or anchor. Raises GrammarError if there is none."""
        found: object
        if local.startswith("#/"):
            found = self._root
            for step in unquote(local[2:]).split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(found, dict) and step in found:
                    found = found[step]
                elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
                    found = found[int(step)]
                else:
                    refuse(f"refers to {local[:200]!r}, where the schema has nothing.", path)
            return found
        found = _anchored(self._root, unquote(local[1:]))
        if found is None:
            refuse(f"refers to {local[:200]!r}, an anchor that the schema does not have.", path)
        return found

    def _resolved(self, schema: object) -> object:
        """Return ``schema``, or what it refers to if it is only a reference."""
        for _ in range(8):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            schema = self._target(reference, "")
        return schema

    # -- branches that exclude each other --------------------------------------------------------------------------

    def _exclusive(self, schema: Schema, branches: object) -> bool:
        """Return whether no value can match two of the ``branches`` of a ``oneOf``, as far as can be seen from their
        types, constants and required properties."""
        if "anyOf" in schema or not isinstance(branches, list) or len(branches) > 256:
            return False
        shapes = [self._values(each, 3) for each in branches]
        return all(_disjoint(a, b) for at, a in enumerate(shapes) for b in shapes[at + 1 :])

    def _values(self, schema: object, levels: int) -> _Values:
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return _Values(None, None, {})
        constants: list[object] | None = None
        if "const" in schema:
            constants = [schema["const"]]
        elif isinstance(given := schema.get("enum"), list):
            constants = given
        kinds: object = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        types = None if not isinstance(kinds, list) else frozenset(map(str, kinds))
        if types is not None and "number" in types:
            types |= {"integer"}
        needed, properties = schema.get("required"), schema.get("properties")
        required: dict[str, _Values] = {}
        if levels and types == frozenset({"object"}) and isinstance(needed, list) and isinstance(properties, dict):
            required = {name: self._values(properties[name], levels - 1) for name in needed if name in properties}
        return _Values(types, constants, required)


class _Values:
    """What is known of the values that match a schema: their types, all possible constants, and the values of required
    properties. None is unknown."""

    __slots__ = ("constants", "required", "types")

    def __init__(
        self, types: frozenset[str] | None, constants: list[object] | None, required: dict[str, _Values]
    ) -> None:
        self.types, self.constants, self.required = types, constants, required


def _disjoint(a: _Values, b: _Values) -> bool:
    if a.constants is not None and b.constants is not None:
        return not any(x == y for x in a.constants for y in b.constants)
    if a.types is not None and b.types is not None and not a.types & b.types:
        return True
    return any(name in b.required and _disjoint(a.required[name], b.required[name]) for name in a.required)


def _anchored(schema: object, name: str) -> object:
    """Return the schema with the ``$anchor`` ``name`` inside ``schema``, None if there is none."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if each.get("$anchor") == name:
                return each
            left += each.values()
        elif isinstance(each, list):
            left += each
    return None


def _constrains(schema: Schema, keyword: str, value: object) -> bool:
    """Return whether an unsupported ``keyword`` can make a value invalid."""
    if keyword == "if":
        return "then" in schema or "else" in schema
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        return value != {}
    return keyword not in _WITHOUT_EFFECT or value is not _WITHOUT_EFFECT[keyword]


def _with_named_properties(schema: Schema) -> Schema:
    """Return ``schema`` with ``propertyNames`` replaced by named properties or a pattern, where that says the same."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    value = rest.get("additionalProperties", True)
    said = {keyword: given for keyword, given in names.items() if keyword not in ("type", "title")}
    allowed, pattern = said.get("enum"), said.get("pattern")
    if not said and names.get("type", "string") == "string":
        return rest
    if len(said) == 1 and isinstance(allowed, list) and all(isinstance(each, str) for each in allowed):
        return {**rest, "properties": dict.fromkeys(allowed, value), "additionalProperties": False}
    if len(said) == 1 and isinstance(pattern, str):
        return {**rest, "patternProperties": {pattern: value}, "additionalProperties": False}
    return schema


def _check_type(schema: Schema, path: str) -> None:
    if "type" not in schema:
        return
    kinds = schema["type"]
    for kind in kinds if isinstance(kinds, list) and kinds else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            refuse(f"must be one of {', '.join(sorted(_TYPES))}, or an array of them.", f"{path}.type")


def _object(value: object, path: str) -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        refuse("must be an object.", path, "invalid_type")
    return list(value.items())


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _array(value: object, path: str) -> list[object]:
    if not isinstance(value, list) or not value:
        refuse("must be an array with at least one schema.", path, "invalid_type")
    return value


def patterns(schema: object, path: str = "") -> list[tuple[str, str]]:
    """Return (path, expression) of all regular expressions in ``schema``, to find the one that does not compile."""
    found: list[tuple[str, str]] = []
    left: list[tuple[str, object]] = [(path, schema)]
    while left:
        at, each = left.pop()
        if isinstance(each, dict):
            if isinstance(each.get("pattern"), str):
                found.append((f"{at}.pattern", each["pattern"]))
            for keyword, value in each.items():
                if keyword == "patternProperties" and isinstance(value, dict):
                    found += [(join(f"{at}.patternProperties", name), name) for name in value]
                if isinstance(value, dict | list):
                    left.append((join(at, keyword), value))
        elif isinstance(each, list):
            left += [(join(at, index), value) for index, value in enumerate(each)]
    return found


def path_of(schema: object, keyword: str) -> str:
    """Return the path of the first ``keyword`` in ``schema``, "" if there is none."""
    left: list[tuple[str, object]] = [("", schema)]
    while left:
        path, each = left.pop(0)
        if isinstance(each, dict):
            if keyword in each:
                return f"{path}.{keyword}"
            left += [(f"{path}.{name}", value) for name, value in each.items()]
        elif isinstance(each, list):
            left += [(f"{path}[{at}]", value) for at, value in enumerate(each)]
    return ""
