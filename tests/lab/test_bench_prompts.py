"""Prompts of an exact length, for tokenizers and texts of many kinds."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep_lab.bench.prompts import (
    CommonWords,
    FileText,
    Openings,
    fitted_prompt,
)
from ultraep_serve.errors import BenchError, ConfigError


def count_words(text: str) -> int:
    return len(text.split())


def count_pieces(text: str) -> int:
    """Like a subword tokenizer that knows few words: four characters a piece, spaces apart."""
    return sum(-(-len(word) // 4) for word in text.split())


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(32, 900), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("count", [count_words, count_pieces, len])
def test_length_is_met(count: Callable[[str], int], tokens: int, seed: int) -> None:
    openings = Openings(random.Random(seed))
    found = count(fitted_prompt(openings, CommonWords(), tokens, seed, count))
    assert found <= tokens
    # Where a token is one character, the filler of two cannot fill every gap.
    assert found >= (0.9 * tokens if count is len else tokens)


@pytest.mark.parametrize("text", ["", " \n", "one"])
def test_source_without_enough_text(text: str) -> None:
    with pytest.raises(BenchError):
        fitted_prompt(Openings(), lambda num_tokens, seed: text, 4096, 0, count_words)


def test_file_text_wraps_around(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Wörter aus einer Datei")
    text = FileText(path)(50, 3)
    assert len(text) == 250
    assert set(text.split()[1:-1]) <= {"Wörter", "aus", "einer", "Datei"}


def test_file_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.txt", "binary.txt"):
        with pytest.raises(ConfigError, match=name):
            FileText(tmp_path / name)
