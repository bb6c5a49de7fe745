"""What experts of a rank share must be the same on all ranks, and all ranks refuse together."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import shared_values
from ultraep_serve.engines.common.shared_values import SharedValues, require_agreement
from ultraep_serve.errors import UnsupportedError


def layer(name: str, scale: float) -> SharedValues:
    values = [("scale", torch.tensor([scale])), ("limit", 7.0)]
    return SharedValues.of(name, values, "a checkpoint without scales")


REFUSED = UnsupportedError("second: not so")


@pytest.mark.parametrize(
    ("own", "elsewhere", "message"),
    [
        ([layer("first", 1.0)], [layer("first", 1.0)], None),
        (
            [layer("first", 1.0), layer("second", 2.0)],
            [layer("first", 1.0), layer("second", 3.0)],
            "second: ranks differ.* one of scale, limit; use a checkpoint without scales, or",
        ),
        ([layer("first", 1.0), REFUSED], [layer("first", 1.0), REFUSED], "second: not so"),
        (
            [layer("first", 1.0), layer("second", 2.0)],
            [layer("first", 1.0), REFUSED],
            "rank 1 cannot balance second; see its log",
        ),
    ],
    ids=["same", "other scale", "refused everywhere", "refused elsewhere"],
)
def test_ranks_compare_what_they_hold(
    monkeypatch: pytest.MonkeyPatch,
    own: list[SharedValues | UnsupportedError],
    elsewhere: list[SharedValues | UnsupportedError],
    message: str | None,
) -> None:
    other = [0 if isinstance(one, UnsupportedError) else one.digest for one in elsewhere]

    class Gather:
        def __init__(self, group: None, timeout_seconds: float) -> None:
            assert timeout_seconds > BalanceConfig().timeout_seconds  # loading takes longer

        def gather(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.stack([row, np.array(other)])

    monkeypatch.setattr(shared_values, "HostAllGather", Gather)
    if message is None:
        require_agreement(own, None, BalanceConfig())  # type: ignore[arg-type]
        return
    with pytest.raises(UnsupportedError, match=message):
        require_agreement(own, None, BalanceConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        [("scale", torch.tensor([1.0]))],
        [("limit", torch.tensor([1.0])), ("scale", 7.0)],
        [("scale", torch.tensor([1.0], dtype=torch.float64)), ("limit", 7.0)],
        [("scale", torch.tensor([[1.0]])), ("limit", 7.0)],
    ],
    ids=["fewer", "other names", "another type", "another shape"],
)
def test_a_digest_is_of_names_types_shapes_and_bytes(
    values: list[tuple[str, torch.Tensor | float]],
) -> None:
    assert SharedValues.of("first", values, "").digest != layer("first", 1.0).digest
