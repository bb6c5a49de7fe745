"""What the interpreted checks share."""

import pytest


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that is about other things than how often the planners try."""
    import ultraep_kernels.device.plan  # here: not every test beside these has Triton
    from balancer_rigs import search_briefly

    import ultraep_serve.policies.quota

    for module in (ultraep_kernels.device.plan, ultraep_serve.policies.quota):
        monkeypatch.setattr(module, "search_of", module.search_of)  # put back afterwards
    search_briefly()
