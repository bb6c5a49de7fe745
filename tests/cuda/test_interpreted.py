"""Every device kernel equals its CPU twin, under Triton's interpreter (no GPU needed)."""

import pytest

from tests.cuda.interpreter import FOLDER, run_interpreted

CHECKS = sorted(path.name for path in FOLDER.glob("check_*.py"))


@pytest.mark.interpreter
@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    run_interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / check))
