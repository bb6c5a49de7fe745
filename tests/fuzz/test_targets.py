"""Committed inputs, and thousands mutated from them, are read or raise errors of ours."""

import random
from pathlib import Path

import pytest

from tests.fuzz.check import CORPUS
from tests.fuzz.targets import TARGETS

SLOW = {"figures": 30, "rings": 200}  # inputs; of others 1500
FOUND = {
    "configs": [
        b'\0{"speeds": "\\ud800"}',  # half of a character
        b'\0{"self": 1}',
    ],
    "routed-answers": [b'\1{"choices": [{}], "usage": {"completion_tokens": 1e999}}'],
}


def mutated(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.randrange(1, 4)):
        start = source.randrange(len(changed) + 1)
        piece = source.choice([source.randbytes(4), b"\xff" * 8, changed[:8], b"", b"1e999", b"{["])
        changed[start : start + source.randrange(8)] = piece
    return bytes(changed)


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_the_bytes(name: str, tmp_path: Path) -> None:
    target, source = TARGETS[name], random.Random(name)
    for folder in ("seeds", "run"):
        (tmp_path / folder).mkdir()
    inputs = [*target.seeds(tmp_path / "seeds"), *FOUND.get(name, ())]
    inputs += [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    read = target.make(tmp_path / "run")
    inputs = inputs[: SLOW.get(name, len(inputs))]
    for data in inputs:
        read(data)
    for _ in range(SLOW.get(name, 1500)):
        read(mutated(source.choice(inputs), source)[: target.max_bytes])
