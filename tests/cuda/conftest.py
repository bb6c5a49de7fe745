"""What the interpreted checks share."""

import pytest


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that is about other things than how often the planners try."""
    import ultraep_kernels.device.plan  # here: not every test beside these has Triton
    import ultraep_kernels.host.plan

    from tests.support.balancer_rigs import search_briefly

    for module in (ultraep_kernels.device.plan, ultraep_kernels.host.plan):
        monkeypatch.setattr(module, "search_of", module.search_of)  # put back afterwards
    search_briefly()
