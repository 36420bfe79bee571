"""Copy the cases, making links of files that were laid as the text of a link.  lay_cases.py FROM TO

A copy of the cases that was laid without symbolic links holds, in the place of each link, a file with the link's target
as text.  The runner makes the links of its manifest only where nothing is, so such a file is removed here.
"""

import json
import shutil
import sys
from pathlib import Path


def main(source: Path, target: Path) -> None:
    """Copy, and repair the links that the manifest names."""
    shutil.copytree(source, target, symlinks=True)
    for path in [target, *target.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)
    for case in json.loads((target / "manifest.json").read_text(encoding="utf-8"))["cases"]:
        for name, link in case["links"].items():
            path = target / case["id"] / name
            if path.is_file() and not path.is_symlink() and path.read_bytes() == link.encode():
                print(f"{case['id']}: {name} was laid as text; the runner makes the link itself")
                path.unlink()
    for folder in ("models", "traces"):
        beside = source.parent / folder
        if beside.is_dir() and not (target.parent / folder).exists():
            (target.parent / folder).symlink_to(beside.resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
