"""The chat templates of one checkpoint: where they are found, and which of them renders a request.

A checkpoint has one template or several named ones: ``default``, ``tool_use`` for requests with tools, and ``rag`` for
requests with documents. They are in ``chat_template.jinja`` and ``additional_chat_templates/``, or in
``tokenizer_config.json``. transformers saves and chooses them by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.core.errors import StartError, reason
from coordinator.requests.spec import ChatBody
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.token_names import read_json

DEFAULT, TOOL_USE, RAG = "default", "tool_use", "rag"


def template_sources(directory: Path, override: str | None) -> dict[str, str]:
    """Return the sources of the templates by name, {} if there is none. ``override``: the option ``--chat-template``, a
    file name or a template, which replaces them all. Raises StartError if a file cannot be read."""
    if override:
        return {DEFAULT: _given(override)}
    file = directory / "chat_template.jinja"
    if not file.is_file():
        return _listed(read_json(directory / "tokenizer_config.json").get("chat_template"))
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    return {DEFAULT: _read(file)} | {each.stem: _read(each) for each in more}


def _listed(candidates: Any) -> dict[str, str]:
    """Return the templates of ``chat_template`` in ``tokenizer_config.json``: one, or a list of named ones, of which
    the first is the default if none has that name."""
    if isinstance(candidates, str):
        return {DEFAULT: candidates}
    named: dict[str, str] = {}
    for item in candidates if isinstance(candidates, list) else ():
        if isinstance(item, dict) and isinstance(template := item.get("template"), str):
            named[str(item.get("name"))] = template
    if named:
        named.setdefault(DEFAULT, next(iter(named.values())))
    return named


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read {file}", reason(error), "download the model again") from error


def _given(option: str) -> str:
    """Return the template of ``--chat-template``."""
    if "{" in option or "\n" in option:
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the chat template {option}", reason(error), "correct --chat-template") from error


class ChatTemplates:
    """The compiled templates. ``sources``: at least the default one. Raises StartError if one does not compile."""

    def __init__(self, sources: Mapping[str, str], special: dict[str, str]) -> None:
        self.default = ChatTemplate(sources[DEFAULT], special)
        self._named = {name: ChatTemplate(sources[name], special) for name in (TOOL_USE, RAG) if name in sources}

    @property
    def arguments_as_text(self) -> bool:
        """Whether the template for tools wants the arguments of calls as text, not as objects."""
        return self._named.get(TOOL_USE, self.default).form.arguments_as_text

    def of(self, body: ChatBody) -> ChatTemplate:
        """Return the template that renders ``body``."""
        name = TOOL_USE if body.tools else RAG if body.documents else DEFAULT
        return self._named.get(name, self.default)
