"""A reader of GGUF files that has nothing of this project."""

from __future__ import annotations

import struct
from pathlib import Path


class Reader:
    """Reads a GGUF from its first byte on, with nothing of this project: `keys` and `tensors` by name, in order."""

    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 4
        assert self.data[:4] == b"GGUF"
        self.version, n_tensors, n_keys = self.take("<IQQ")
        self.keys: dict[bytes, bytes] = {}
        for _ in range(n_keys):
            name, start = self.string(), self.at
            self.skip(self.take("<I")[0])
            assert name not in self.keys
            self.keys[name] = self.data[start : self.at]
        infos = {self.string(): self.info() for _ in range(n_tensors)}
        assert len(infos) == n_tensors
        unit = self.keys.get(b"general.alignment", b"\4\0\0\0\x20\0\0\0")
        self.alignment = int.from_bytes(unit[4:8], "little")
        self.start = -(-self.at // self.alignment) * self.alignment if infos else self.at
        self.offsets = {name: offset for name, (_, _, offset) in infos.items()}
        self.tensors = {name: (ne, kind) for name, (ne, kind, _) in infos.items()}

    def take(self, form: str) -> tuple[int, ...]:
        self.at += struct.calcsize(form)
        return struct.unpack_from(form, self.data, self.at - struct.calcsize(form))

    def string(self) -> bytes:
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def info(self) -> tuple[tuple[int, ...], int, int]:
        (dims,) = self.take("<I")
        return self.take(f"<{dims}Q"), *self.take("<IQ")  # type: ignore[return-value]

    def skip(self, kind: int) -> None:
        if kind == 8:
            self.string()
        elif kind == 9:
            item, count = self.take("<IQ")
            for _ in range(count):
                self.skip(item)
        else:
            self.at += {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]


def raw_name(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
