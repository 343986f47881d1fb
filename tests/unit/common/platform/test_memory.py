"""The memory that a process may take, and its default share of it for KV."""

from __future__ import annotations

from pathlib import Path

from common.platform import memory
from common.platform.memory import GIB, kv_budget


def test_kv_budget_is_a_quarter_shared_and_bounded() -> None:
    assert kv_budget(1, 8 * GIB) == 2 * GIB
    assert kv_budget(2, 8 * GIB) == GIB
    assert kv_budget(1, 100 * GIB) == 4 * GIB
    assert 0 < kv_budget(4) <= 4 * GIB


def test_a_control_group_limits_free_memory(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 5\ninactive_file 50000\n"
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert memory._v2_level(tmp_path) == 350_000
    (tmp_path / "memory.max").write_text("max")
    assert memory._v2_level(tmp_path) is None
    assert memory._v2_level(tmp_path / "nothing") is None
