"""JSON schemas as cases of one type each, for notations of arguments that are no JSON.

A value matches a schema exactly if it matches one of its cases: references, ``allOf``, ``anyOf``, ``oneOf`` and lists
of types are multiplied out. Keywords that cannot be combined are refused if the tool is strict, else left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.grammar import lark, texts
from coordinator.grammar.texts import Inexpressible

Schema = dict[str, object]

KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_MAX_CASES, _MAX_DEPTH = 64, 24
_BOUNDS: Mapping[str, Callable[..., object]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
_OF_KIND: Mapping[str, frozenset[str]] = {
    "string": frozenset({"patterns", "format", "minLength", "maxLength"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
    ),
    **dict.fromkeys(
        ("integer", "number"),
        frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    ),
}
"""Keywords that constrain values of a type."""


@dataclass(frozen=True, slots=True)
class Case:
    """Values of one type ``kind``: those that match ``schema``, which has keywords for this type only (``pattern`` as
    the list ``patterns``), or with ``kind`` "constants" exactly those in ``constants``."""

    kind: str
    schema: Schema = field(default_factory=dict)
    constants: tuple[object, ...] = ()

    @property
    def free(self) -> bool:
        """Whether any value of the type matches."""
        return self.kind != "constants" and not self.schema


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an object. ``named``: (name, schema, whether it must be there) in the order of the schema;
    ``others``: (terms for the key, schema) of members with other names, which come behind them; ``bounds``: how many of
    those there may be."""

    named: list[tuple[str, object, bool]]
    others: list[tuple[list[str], object]]
    bounds: tuple[int, int | None] = 0, None


class Document:
    """The schema of a tool's parameters, as :func:`~coordinator.grammar.json_schema.prepared` returns it. ``strict``:
    what cannot be obeyed raises Inexpressible."""

    def __init__(self, made: Mapping[str, object], *, strict: bool) -> None:
        self.strict, self.given_up = strict, list[str]()
        root = {keyword: value for keyword, value in made.items() if keyword != "$defs"}
        found = made.get("$defs")
        definitions = {**(found if isinstance(found, dict) else {}), "root": root}
        self.definitions = {name: _rooted(each) for name, each in definitions.items()}
        self.root = self.definitions["root"]

    def give_up(self, keyword: str) -> None:
        """Leave ``keyword`` out. Raises Inexpressible if the tool is strict."""
        if self.strict:
            raise Inexpressible(keyword)
        self.given_up.append(keyword)

    def target(self, reference: object) -> object:
        """Return the schema that ``reference`` names."""
        return self.definitions.get(str(reference).removeprefix("#/$defs/"), self.root)

    def embedded(self, schema: Schema) -> Schema:
        """Return ``schema`` as a document of its own, with the definitions that it needs."""
        needed: dict[str, object] = {}
        left: list[object] = [schema]
        while left:
            each = left.pop()
            if isinstance(each, dict):
                name = str(each.get("$ref", "")).removeprefix("#/$defs/")
                if name in self.definitions and name not in needed:
                    needed[name] = self.definitions[name]
                    left.append(needed[name])
                left += each.values()
            elif isinstance(each, list):
                left += each
        return {**schema, "$defs": needed} if needed else schema

    # -- cases ------------------------------------------------------------------------------------------------------

    def cases(self, schema: object) -> list[Case]:
        """Return the cases of ``schema``, [] if no value matches. Raises Inexpressible."""
        found: list[Case] = []
        for flat in self._flat(schema, 0):
            kinds = _kinds(flat)
            if "enum" in flat:
                values = flat["enum"]
                assert isinstance(values, list)
                constants = tuple(each for each in values if _kind_of(each) in kinds and _fits(each, flat))
                if constants:
                    found.append(Case("constants", {}, constants))
                continue
            for kind in kinds:
                if kind != "integer" or "number" not in kinds:
                    of_kind = _OF_KIND.get(kind, frozenset())
                    found.append(Case(kind, {name: value for name, value in flat.items() if name in of_kind}))
        return found

    def members(self, schema: Schema) -> Members:
        """Return the members of objects that match the ``schema`` of a case."""
        properties, needed = _mapping(schema.get("properties")), _list(schema.get("required"))
        patterns = _mapping(schema.get("patternProperties"))
        rest = schema.get("additionalProperties", not properties)
        named = [(name, each, name in needed) for name, each in properties.items()]
        named += [(str(name), True if rest is False else rest, True) for name in needed if name not in properties]
        named = [each for each in named if each[1] is not False or each[2]]
        others: list[tuple[list[str], object]] = []
        not_named = [f"~{texts.either([lark.literal(name) for name, _, _ in named])}"] if named else []
        unmatched = list(not_named)
        for pattern, each in patterns.items():
            term = texts.searching(pattern)
            others += [([term, *not_named], each)] if each is not False else []
            unmatched.append(f"~{term}")
        if rest is not False:
            others.append((unmatched, rest))
        return Members(named, others, self._counted(schema, named, bool(others)))

    def _counted(
        self, schema: Schema, named: Sequence[tuple[str, object, bool]], open_: bool
    ) -> tuple[int, int | None]:
        """Return how often other members may occur, so that the bounds on their number hold."""
        least, most = texts.whole(schema.get("minProperties")) or 0, texts.whole(schema.get("maxProperties"))
        needed = sum(each[2] for each in named)
        if not named and open_:
            return texts.bounds(schema, "minProperties", "maxProperties")
        if least > needed:
            self.give_up("minProperties")
        if most is None or (len(named) <= most and not open_):
            return 0, None
        if len(named) > most:
            self.give_up("maxProperties")
        return 0, max(0, most - len(named))

    # -- multiplying out --------------------------------------------------------------------------------------------

    def _flat(self, schema: object, depth: int) -> list[Schema]:
        """Return schemas without combining keywords, of which a value must match one."""
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [{}]
        if depth > _MAX_DEPTH:
            self.give_up("$ref")
            return [{}]
        found: list[Schema] = [_own(schema)]
        if "$ref" in schema:
            found = self._product(found, self._flat(self.target(schema["$ref"]), depth + 1), "$ref")
        for each in _list(schema.get("allOf")):
            found = self._product(found, self._flat(each, depth + 1), "allOf")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [flat for each in _list(schema[keyword]) for flat in self._flat(each, depth + 1)]
                found = self._product(found, options, keyword)
        return found

    def _product(self, some: list[Schema], others: list[Schema], keyword: str) -> list[Schema]:
        if len(some) * len(others) > _MAX_CASES:
            self.give_up(keyword)
            return some
        return [merged for one in some for other in others if (merged := self._merged(one, other)) is not None]

    def _merged(self, one: Schema, other: Schema) -> Schema | None:
        """Return a schema that means both, None if no value matches both."""
        made: Schema = {**other, **one}
        for keyword in one.keys() & other.keys():
            made[keyword] = self._both(keyword, one, other)
        if "properties" in made and ("properties" not in one or "properties" not in other):
            self._rest(made, one if "properties" not in one else other)
        elif "properties" in made:
            for closed, open_ in ((one, other), (other, one)):
                self._rest(made, closed, _mapping(closed["properties"]), _mapping(open_["properties"]))
        if "enum" in made and not made["enum"]:
            return None
        return made if _kinds(made) else None

    def _rest(
        self,
        made: Schema,
        closed: Schema,
        known: Mapping[str, object] | None = None,
        names: Mapping[str, object] | None = None,
    ) -> None:
        """Apply what ``closed`` says about properties that it does not name to those that only the other schema
        names."""
        rest = closed.get("additionalProperties", True)
        if rest is True:
            return
        if "patternProperties" in closed:
            self.give_up("patternProperties")
            return
        properties = dict(_mapping(made["properties"]))
        for name in properties if names is None else names:
            if name not in (known or {}):
                properties[name] = False if rest is False else {"allOf": [properties[name], rest]}
        made["properties"] = properties

    def _both(self, keyword: str, one: Schema, other: Schema) -> object:
        """Return the value of ``keyword`` that means what it says in two schemas."""
        a, b = one[keyword], other[keyword]
        if a == b:
            return a
        if keyword in _BOUNDS:
            return _BOUNDS[keyword](a, b)
        match keyword:
            case "type":
                return [kind for kind in _kinds(one) if kind in _kinds(other)]
            case "enum":
                return [each for each in _list(a) if any(_same(each, value) for value in _list(b))]
            case "patterns":
                return [*_list(a), *_list(b)]
            case "required":
                return list(dict.fromkeys([*map(str, _list(a)), *map(str, _list(b))]))
            case "properties":
                ours, theirs = _mapping(a), _mapping(b)
                both = {name: {"allOf": [ours[name], theirs[name]]} for name in ours.keys() & theirs.keys()}
                return {**ours, **theirs, **both}
            case "additionalProperties":
                return False if a is False or b is False else {"allOf": [a, b]}
            case "items" if not {"prefixItems", "additionalItems"} & {*one, *other}:
                return {"allOf": [a, b]}
        self.give_up(keyword)
        return a


def _own(schema: Schema) -> Schema:
    """Return the keywords of ``schema`` itself, with those of older drafts as of 2020-12."""
    made = {keyword: value for keyword, value in schema.items() if keyword not in _COMBINING}
    if isinstance(pattern := made.pop("pattern", None), str):
        made["patterns"] = [pattern]
    if "const" in made:
        value = made.pop("const")
        made["enum"] = [each for each in _list(made.get("enum", [value])) if _same(each, value)]
    if isinstance(items := made.get("items"), list):
        made["prefixItems"] = items
        made["items"] = made.pop("additionalItems", True)
    return made


def _kinds(schema: Schema) -> list[str]:
    """Return the types that ``schema`` allows."""
    given = schema.get("type", list(KINDS))
    allowed = {given} if isinstance(given, str) else {str(each) for each in _list(given)}
    return [kind for kind in KINDS if kind in allowed or (kind == "integer" and "number" in allowed)]


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _fits(value: object, schema: Schema) -> bool:
    """Return whether a constant keeps the bounds in ``schema``; its other keywords are taken to hold."""
    if isinstance(value, str):
        low, high = texts.whole(schema.get("minLength")), texts.whole(schema.get("maxLength"))
        return (low or 0) <= len(value) and (high is None or len(value) <= high)
    if isinstance(value, int | float) and not isinstance(value, bool):
        least, most = schema.get("minimum"), schema.get("maximum")
        above = not isinstance(least, int | float) or least <= value
        return above and (not isinstance(most, int | float) or value <= most)
    return True


def _same(a: object, b: object) -> bool:
    return _kind_of(a) == _kind_of(b) and a == b


def _rooted(schema: object) -> Schema:
    """Return ``schema`` with references to the whole document by name."""

    def renamed(each: object) -> object:
        if isinstance(each, list):
            return [renamed(one) for one in each]
        if not isinstance(each, dict):
            return each
        if each.get("$ref") == "#":
            each = {**each, "$ref": "#/$defs/root"}
        return {name: value if name in ("const", "enum") else renamed(value) for name, value in each.items()}

    made = renamed(schema)
    return made if isinstance(made, dict) else {} if made is not False else {"enum": []}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
