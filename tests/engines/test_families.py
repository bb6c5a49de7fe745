"""Model families whose experts differ most from the others', each on a real engine."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.model_families.matrix import measure_family

pytestmark = [pytest.mark.engine, pytest.mark.night]

# All of them: make test-families.
FAMILIES = [
    ("vllm", "gpt-oss"),
    ("vllm", "dots1"),
    ("sglang", "Phi-MoE"),
    ("sglang", "GLM-4-MoE"),
]


@pytest.mark.parametrize(("engine", "family"), FAMILIES)
def test_is_balanced_and_answers_as_without(engine: str, family: str, tmp_path: Path) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}: make setup, make setup-sglang")
    row = measure_family(engine, family, tmp_path)
    assert row["verdict"] == "balanced", row
    assert all(before > 1.1 for before, _ in row["layers"].values())
