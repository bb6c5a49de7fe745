"""What the checks of kernels share; they run under the interpreter, or on a GPU."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # not every test here has Triton
    from tests.support.bench import Bench


@pytest.fixture(scope="session")
def bench() -> "Bench":
    """Where a kernel runs."""
    from tests.support.bench import Bench

    return Bench()


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that is about other things than how often the planners try."""
    import ultraep_kernels.device.plan
    import ultraep_kernels.host.plan
    from ultraep_kernels.contract import Search

    for module in (ultraep_kernels.device.plan, ultraep_kernels.host.plan):
        monkeypatch.setattr(module, "search_of", lambda *_: Search(512, 2, 4, 8, 2))
