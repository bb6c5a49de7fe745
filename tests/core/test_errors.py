"""Messages of errors: what went wrong, what to do, and one remedy that always works."""

import pickle

import pytest

from ultraep_serve.errors import POLICY_OFF, SERVE_UNBALANCED, UnsupportedError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnsupportedError("no peer access"), f"no peer access; {SERVE_UNBALANCED}"),
        (UnsupportedError("7 experts; use 8"), f"7 experts; use 8, or {SERVE_UNBALANCED}"),
        (
            UnsupportedError("one rank; add one", otherwise=POLICY_OFF),
            f"one rank; add one, or {POLICY_OFF}",
        ),
        (UnsupportedError("no kernel; use another", otherwise=""), "no kernel; use another"),
    ],
)
def test_the_remedy_is_said_once_in_any_process(error: UnsupportedError, message: str) -> None:
    assert str(error) == message
    assert str(pickle.loads(pickle.dumps(error))) == message
    assert message.startswith(error.problem)
