"""A model's own Python code as bytes: part of what its compiled programs are known by."""

from __future__ import annotations

from pathlib import Path


def python_source(folder: Path) -> bytes:
    """Every Python file of a version's folder, with its name."""
    pieces: list[bytes] = []
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        pieces.append(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return b"".join(pieces)
