"""``tandem config --check`` names every wrong option of a file with its line, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.main import main
from tests.leaked_keys import new_key

FILE = """\
# a comment
log-levle: debug
port: eighty
dtype: bfloat61
log_level: info
log-level: debug
max-num-seqs: 8
colocated: [1, 2]
cpus: 0-3
lend-cores: maybe
prefill:
"""


def checked(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[int, list[str]]:
    code = main(["config", "--check", str(path), *words])
    lines = capsys.readouterr().out.replace(f"{path}:", "").splitlines()
    return code, [line.strip() for line in lines]


def test_every_wrong_option_is_named_with_its_line_and_a_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "up.yaml"
    path.write_text(FILE)
    code, lines = checked(capsys, path)
    assert code == 1
    assert lines == [
        "2: unknown option log-levle: did you mean log-level?",
        "3: port cannot be 'eighty': it takes a whole number from 0 to 65535",
        "4: dtype cannot be 'bfloat61': it takes one of auto, float32, bfloat16, float16; did you mean bfloat16?",
        "6: log-level is set again, first in line 5",
        "8: colocated is not a single value: it takes a whole number from 1 to 4096",
        "10: lend-cores cannot be 'maybe': it takes true or false",
    ]


def test_a_file_may_be_shared_among_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.yaml"
    path.write_text("coordinator: 10.0.0.1:8001\nport: 8000\n")
    assert checked(capsys, path) == (0, ["no errors"])
    code, lines = checked(capsys, path, "up")
    assert code == 0
    assert (
        lines[0] == "1: note: coordinator has no effect on tandem up; it is an option of tandem decode, tandem prefill"
    )
    assert lines[1] == "no errors; tandem up accepts it"


def test_a_command_refuses_what_is_wrong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "up.yaml"
    path.write_text("colocated: 1\ndecode: 2\n")
    assert checked(capsys, path)[0] == 0
    code, lines = checked(capsys, path, "up")
    assert code == 1 and lines[0].startswith("--colocated excludes --prefill and --decode")
    path.write_text("host: 0.0.0.0\n")
    code, lines = checked(capsys, path, "coordinator")
    assert code == 1 and "will not listen on 0.0.0.0 without a key" in lines[0]
    path.write_text("port: 8001\ncontrol-port: 8001\n")
    for command in "up", "coordinator":
        code, lines = checked(capsys, path, command)
        assert code == 1 and lines[0].startswith("--port and --control-port are both 8001")
    key = tmp_path / "absent.key"
    path.write_text(f"cluster-key-file: {key}\n")
    code, lines = checked(capsys, path, "decode")
    assert code == 1 and "cannot read" in lines[0]


def test_values_that_only_some_commands_accept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``threads`` of a worker may be automatic, but all commands that have it take numbers of at least 1."""
    path = tmp_path / "some.yaml"
    path.write_text("systems: 1p1d\nthreads: 0\n")
    code, lines = checked(capsys, path)
    assert code == 1 and lines == ["2: threads cannot be '0': it takes a whole number from 1 to 4096"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_secrets_are_neither_shown_nor_accepted_where_others_can_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    path, key = tmp_path / "up.yaml", new_key()
    path.write_text(f"port: 1\napi-key: {key}\n{key}: 1\n{key}: 2\n")
    path.chmod(mode)
    code, lines = checked(capsys, path)
    assert code == 1 and not any(key in line for line in lines)
    assert [line.partition(" ")[0] for line in lines] == (["2:"] if mode == 0o644 else []) + ["3:", "4:", "4:"]


def test_what_is_not_a_file_of_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "up.yaml"
    for text, why in (("- a\n", "not a mapping"), ("a: [\n", "not YAML"), ("port: !!int x\n", "not YAML")):
        path.write_text(text)
        assert main(["config", "--check", str(path)]) == 1
        assert why in capsys.readouterr().err
    assert main(["config", "--check", str(tmp_path / "none.yaml")]) == 1
    said = capsys.readouterr().err
    assert "No such file" in said and "correct --check" in said


@pytest.mark.parametrize("words", ["--check", "--check --port", "--check=f bench", "--check=f up x"])
def test_wrong_words(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words.split()]) == 1
    assert capsys.readouterr().err


def test_merged_keys_are_checked_where_they_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "up.yaml"
    path.write_text("<<: {port: 1, dtype: float32}\nport: 2\nblock-size: 7\n")
    code, lines = checked(capsys, path)
    assert code == 1 and lines == [
        "3: block-size cannot be '7': it takes a multiple of 16 from 16 to 65536 (32k is 32,000, 32K is 32,768)"
    ]
