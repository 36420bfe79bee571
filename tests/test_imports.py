"""The direction of imports, read from the source: what each package and module may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_USE = {
    "formats": {"formats"},
    "repack": {"formats", "repack"},
    "runtime": {"formats", "runtime"},
    "profiler": {"formats", "runtime", "profiler"},
}
TERMINAL = {"rich", "click", "tqdm"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found or folders == ("profiler",) or folders == ("runtime",), "a folder without sources is a test that cannot fail"
    return found


def modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that is imported; `from bel import formats` counts as bel.formats."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports(path: Path) -> list[tuple[int, list[str]]]:
    return [(line, name.split(".")) for line, name in modules(ast.parse(path.read_text(encoding="utf-8"), str(path)))]


def is_cli(path: Path) -> bool:
    return path.stem == "cli" or path.stem.endswith("_cli")


def may_speak(path: Path) -> bool:
    return is_cli(path) or (path.parent.name, path.stem) == ("formats", "console")


def is_program(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body)


PACKAGED = sources(*MAY_USE)
NAMES = [str(path.relative_to(ROOT)) for path in PACKAGED]


@pytest.mark.parametrize("path", PACKAGED, ids=NAMES)
def test_packages_import_downwards_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    wrong = [f"{path.name}:{line} {'.'.join(m)}" for line, m in imports(path) if m[0] == "bel" and m[1] not in MAY_USE[package]]
    assert wrong == []


@pytest.mark.parametrize("path", PACKAGED, ids=NAMES)
def test_terminal_libraries_stay_in_the_cli(path: Path) -> None:
    used = {m[0] for _, m in imports(path)} & TERMINAL
    used |= {".".join(m) for _, m in imports(path) if m[:3] == ["bel", "formats", "console"]}
    assert used == set() or may_speak(path)
    cli = [line for line, m in imports(path) if m[0] == "bel" and len(m) > 2 and is_cli(Path(m[2]))]
    assert cli == [] or is_cli(path), "nothing but a cli module stands on one"


@pytest.mark.parametrize("path", PACKAGED, ids=NAMES)
def test_only_the_cli_prints(path: Path) -> None:
    """A worker process, which is a program of its own, may write to its stderr: its parent reads that."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    spoken = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]
    streams = {"sys.stdout"} if is_program(tree) else {"sys.stdout", "sys.stderr"}
    spoken += [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) in streams]
    assert spoken == [] or may_speak(path)


@pytest.mark.parametrize("path", PACKAGED, ids=NAMES)
def test_the_gguf_package_is_for_formats_only(path: Path) -> None:
    assert path.parent.name == "formats" or "gguf" not in {m[0] for _, m in imports(path)}


@pytest.mark.parametrize("path", [*PACKAGED, *sources("tests")], ids=[*NAMES, *(p.name for p in sources("tests"))])
def test_packages_are_called_by_their_installed_names(path: Path) -> None:
    """`import formats` works in a checkout and nowhere else."""
    assert [f"{path.name}:{line}" for line, m in imports(path) if m[0] in MAY_USE] == []


@pytest.mark.parametrize("package", MAY_USE)
def test_packages_are_flat(package: str) -> None:
    assert [p for p in sources(package) if p.parent != ROOT / package] == []


def test_the_reader_of_imports_sees_every_form() -> None:
    text = "import a.b as c\ndef f():\n    from bel import runtime\n    if x:\n        from bel.formats.units import MIB, GIB\n"
    assert [name for _, name in modules(ast.parse(text))] == [
        "a.b",
        "bel.runtime",
        "bel.formats.units.MIB",
        "bel.formats.units.GIB",
    ]
