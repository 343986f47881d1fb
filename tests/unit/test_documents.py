"""Files, headings, flags and commands that the documents name exist. Their prose is not checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.coordinator import CoordinatorConfig
from common.config.options import options
from common.config.worker import WorkerConfig
from common.net import keys
from deploy.cli.commands import COMMANDS, CONFIGS, FAMILIES, load_config
from deploy.cli.main import build_parser
from tests.leaked_keys import new_key

ROOT = Path(__file__).parents[2]
TOP = sorted(ROOT.glob("*.md"))
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
OTHERS = [ROOT / "kvtransfer" / "PROTOCOL.md", ROOT / "tests" / "README.md", ROOT / "tests" / "golden" / "README.md"]
DOCUMENTS = [*TOP, *PAGES, *OTHERS]
OTHERS_COMMANDS = "python -m |pytest |pip |apt |git |vllm |useradd |systemctl |docker |kubectl "
MADE_BY_THE_READER = {
    *("cluster.key", "decode.key", "keys.txt", "api-keys.txt", "before.json", "trace.csv", "run.json", "run.png"),
}


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1600


@pytest.mark.parametrize("document", [*TOP, *PAGES], ids=_name)
def test_every_flag_exists(document: Path) -> None:
    every = [item for config in CONFIGS for item in options(config)]
    known = {flag for item in every for flag in (item.flag, *item.aliases)} | {"--config", "--version", "--help"}
    known |= {f"--no-{flag[2:]}" for flag in known}
    for line in document.read_text(encoding="utf-8").splitlines():
        if "tandem" in line or "`--" in line:
            ours = re.sub(rf"`?(?:\.venv/bin/)?(?:{OTHERS_COMMANDS})[^`|]*", "", line)
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z](?!…)", ours):
                assert flag in known or flag.removesuffix("-") in known, f"{flag} in: {line}"


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield the first word and the rest of every ``tandem …`` in a console block, with continued lines joined."""
    text = text.replace("\\\n", " ")
    yield from re.findall(r"^\w?\$ (?:\.venv/bin/)?tandem (\w+) ?(.*?)(?: +#.*)?$", text, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_command_that_is_shown_is_understood(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flags are valid and it may bind its addresses, so it would not be refused before it opens its model."""
    _, commands = build_parser()
    monkeypatch.chdir(tmp_path)
    keys.make(tmp_path / "cluster.key")
    (tmp_path / "keys.txt").touch(0o600)
    (tmp_path / "keys.txt").write_text(new_key())
    for first, rest in _commands(document.read_text(encoding="utf-8")):
        if first == "config":
            first, _, rest = re.sub(r"^--check \S+ ?", "", rest).partition(" ")
            if not first:
                continue
        second, _, words = rest.partition(" ") if first in FAMILIES else ("", "", rest)
        name = f"{first} {second}".strip()
        given = vars(commands[name].parse_args(shlex.split(words)))
        loaded = load_config(COMMANDS[name].config, given, {}, **COMMANDS[name].fixed).config
        if isinstance(loaded, CoordinatorConfig | WorkerConfig):
            replace(loaded, cluster_key_file=str(tmp_path / "cluster.key")).check_binds()


def test_commands_are_found() -> None:
    shown = {first for document in DOCUMENTS for first, _ in _commands(document.read_text(encoding="utf-8"))}
    assert {"up", "chat", "coordinator", "prefill", "decode", "keygen", "scale", "eval", "bench"} <= shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`([\w./-]+/|[\w./-]+\.(?:py|md|txt|toml|sh|jsonl|json|c|h))`", text):
        if "/" in path.rstrip("/") and not path.startswith(("/", "build/", ".venv", ".cache")):
            found = any((folder / path).exists() for folder in (ROOT, document.parent))
            assert found or Path(path).name in MADE_BY_THE_READER, path


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    """Sphinx checks links among its pages; this covers documents outside the site too, which are read on the web."""
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", document.read_text(encoding="utf-8")):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), path
        if anchor:
            lines = _with_included(target).splitlines()
            assert anchor in {_anchor(line) for line in lines if line.startswith("#")}, (path, anchor)


def _with_included(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return text + "".join(
        (page.parent / path).read_text(encoding="utf-8") for path in re.findall(r"{include} (\S+)", text)
    )


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")
