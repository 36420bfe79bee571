"""Check a wheel's contents: every module of every package, its documents, and nothing else.  check_wheel.py WHEEL"""

import sys
import tomllib
import zipfile
from pathlib import Path


def main(wheel: str) -> None:
    """Exit with a message where the wheel lacks a file of the tree or holds one that it should not."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]
    want = set()
    for package, folder in settings["package-dir"].items():
        if package not in settings["packages"]:
            sys.exit(f"{package} has a folder but is not among the packages")
        for path in Path(folder).rglob("*"):
            if path.suffix in (".py", ".md") or path.name == "py.typed":
                want.add(f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}")
    folders = {p.parent.name for p in Path().glob("*/py.typed")}
    if folders != set(settings["package-dir"].values()):
        sys.exit(f"typed folders {sorted(folders)} are not the packaged ones")
    with zipfile.ZipFile(wheel) as archive:
        have = {n for n in archive.namelist() if ".dist-info/" not in n}
    if have != want:
        sys.exit(f"missing from the wheel: {sorted(want - have)}; not of the project: {sorted(have - want)}")
    print(f"{Path(wheel).name}: {len(have)} files, as in the tree")


if __name__ == "__main__":
    main(sys.argv[1])
