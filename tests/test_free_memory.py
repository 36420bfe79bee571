"""How much memory is left, from made-up machines: what the machine says, and the limits of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from bel.runtime.free_memory import free_bytes

KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """8 GiB free, and no limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:    {8 * GIB // KIB} kB\nSwapTotal: 0 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "groups").mkdir()
    return tmp_path


def group(machine: Path, line: str, files: dict[str, dict[str, str]]) -> int:
    """The answer with these files in these groups."""
    (machine / "proc/self/cgroup").write_text(line + "\n")
    for folder, contents in files.items():
        (machine / "groups" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (machine / "groups" / folder / name).write_text(text)
    return free_bytes(machine / "proc", machine / "groups")


def test_without_limits_it_is_what_the_machine_has(machine: Path) -> None:
    assert free_bytes(machine / "proc", machine / "groups") == 8 * GIB


def test_a_limit_leaves_what_is_not_used_and_caches_count_as_free(machine: Path) -> None:
    stat = f"anon {GIB}\nfile {2 * GIB}\n"
    assert group(machine, "0::/a/b", {"a/b": {"memory.max": f"{4 * GIB}\n", "memory.stat": stat}}) == 3 * GIB


def test_the_tightest_of_all_groups_above_counts(machine: Path) -> None:
    files = {
        "a/b": {"memory.max": "max\n", "memory.stat": "anon 0\n"},
        "a": {"memory.max": f"{2 * GIB}\n", "memory.stat": f"anon {GIB}\n"},
    }
    assert group(machine, "0::/a/b", files) == GIB


def test_version_1_has_its_own_names(machine: Path) -> None:
    files = {"memory/a": {"memory.limit_in_bytes": f"{3 * GIB}\n", "memory.stat": f"rss 5\ntotal_rss {GIB}\n"}}
    assert group(machine, "9:cpu:/x\n4:cpuset,memory:/a\n0::/", files) == 2 * GIB


def test_version_1_without_a_limit_shows_a_huge_one(machine: Path) -> None:
    files = {"memory/a": {"memory.limit_in_bytes": "9223372036854771712\n", "memory.stat": "total_rss 0\n"}}
    assert group(machine, "4:memory:/a", files) == 8 * GIB


def test_a_group_above_its_limit_leaves_nothing(machine: Path) -> None:
    assert group(machine, "0::/a", {"a": {"memory.max": "100", "memory.stat": "anon 200\n"}}) == 0


def test_a_limit_above_the_machine_changes_nothing(machine: Path) -> None:
    assert group(machine, "0::/a", {"a": {"memory.max": str(64 * GIB), "memory.stat": "anon 0\n"}}) == 8 * GIB


def test_this_machine_has_an_answer() -> None:
    assert 0 < free_bytes() < 1 << 50
