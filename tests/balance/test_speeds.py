"""Speeds of ranks: measured without bias, agreed on by all, and still where nothing has changed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED
from ultraep_kernels.host.speeds import measured_speeds

from ultraep_serve.balance.backend import fixed_speeds
from ultraep_serve.balance.own_time import OwnTime
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.errors import ConfigError
from ultraep_serve.types import parse_speeds

PER_ASSIGNMENT = 10_000_000  # picoseconds
FIXED = 600  # assignments that take as long as what a layer costs whatever its load
COSTS = IntegerCosts(PER_ASSIGNMENT, 0, 0, 0, 0, 0, base=FIXED * PER_ASSIGNMENT)
LAYERS = 8
TO_SETTLE = 48  # batches

Slowness = Callable[[int, int], NDArray[np.float64]]  # batch and layer to a factor per rank
Loads = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


def by_speed(batch: int, speeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a perfect plan gives every rank of a batch's assignments."""
    return (1000 + 3000 * (batch % 5)) * speeds.size * speeds // speeds.sum()


def serve(slowness: Slowness, num_batches: int, loads: Loads = by_speed) -> NDArray[np.int64]:
    """Speeds (B, R) in use, batch by batch, of ranks that measure and publish.

    A layer takes a fixed time and some per assignment, all of it times the rank's ``slowness``.
    """
    ranks = [OwnTime(COSTS, num_masters=4) for _ in slowness(0, 0)]
    used = []
    for batch in range(num_batches):
        used.append(measured_speeds(np.array([rank.picoseconds for rank in ranks])))
        load = loads(batch, used[-1])
        slow = np.stack([slowness(batch, layer) for layer in range(LAYERS)])  # (LAYERS, R)
        nanoseconds = ((FIXED + load) * PER_ASSIGNMENT / 1e3 * slow).round().astype(int)
        for rank, spent, own in zip(ranks, nanoseconds.T.tolist(), load.tolist(), strict=True):
            rank.add_batch(spent, [own] * LAYERS, [int(load.min())] * LAYERS)
    return np.stack(used)


def noise(seed: int, num_ranks: int, relative: float, outliers: float = 0.0) -> Slowness:
    """Every layer a little off; rarely one takes twenty times as long."""

    def factor(batch: int, layer: int) -> NDArray[np.float64]:
        rng = np.random.default_rng((seed, batch, layer))
        stretched = np.where(rng.random(num_ranks) < outliers, 20.0, 1.0)
        return stretched * np.exp(rng.normal(0, relative, num_ranks))

    return factor


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_noise_and_outliers_change_nothing_in_a_thousand_batches(num_ranks: int) -> None:
    used = serve(noise(1, num_ranks, relative=0.05, outliers=0.002), 1000)
    assert (used == FULL_SPEED).all()


@settings(deadline=None)
@given(st.lists(st.floats(0.2, 1.0), min_size=2, max_size=6))
def test_speeds_settle_near_those_of_the_ranks_and_stay(true: list[float]) -> None:
    relative = np.array(true) / max(true)
    used = serve(lambda *_: 1 / relative, TO_SETTLE + 10)
    assert (used[TO_SETTLE:] == used[TO_SETTLE]).all()
    error = abs(used[-1] / FULL_SPEED - relative)
    assert (error < np.where(used[-1] == FULL_SPEED, 0.15, 0.09)).all()


@pytest.mark.parametrize("slower", [0.5, 0.75, 0.82, 0.92])
def test_a_straggler_is_found_through_noise_and_does_not_oscillate(slower: float) -> None:
    quiet = noise(2, 4, relative=0.03, outliers=0.002)
    slow = np.array([1.0, 1 / slower, 1.0, 1.0])
    used = serve(lambda batch, layer: quiet(batch, layer) * slow, 400)[TO_SETTLE:]
    changes = (np.diff(used, axis=0) != 0).any(axis=1).sum()
    assert changes <= 3
    assert abs(used[:, 1].mean() / FULL_SPEED - slower) < 0.09
    assert (used[:, [0, 2, 3]] == FULL_SPEED).all()


def test_what_a_rank_was_given_does_not_make_it_slow() -> None:
    """Little work shows a layer's fixed time most; equal ranks must still count as equal."""

    def uneven(batch: int, _speeds: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([700, 1400, 2800, 700]) * (1 + batch % 3)

    assert (serve(noise(3, 4, relative=0.03), 200, uneven) == FULL_SPEED).all()


def test_speeds_follow_a_rank_that_slows_down_and_recovers() -> None:
    def changing(batch: int, _layer: int) -> NDArray[np.float64]:
        return np.array([1.0, 2.0 if 50 <= batch < 110 else 1.0])

    used = serve(changing, 170)
    assert (used[:50] == FULL_SPEED).all()
    assert (used[50 + TO_SETTLE : 110] == [FULL_SPEED, FULL_SPEED // 2]).all()
    assert (used[110 + TO_SETTLE :] == FULL_SPEED).all()


def test_fixed_speeds_are_relative_to_the_largest() -> None:
    assert fixed_speeds("auto", 2) is None
    for text, expected in (
        ("equal", [1024, 1024]),
        ("1.0,0.6", [1024, 614]),
        ("0.3, 0.15", [1024, 512]),
        ("1,1e-9", [1024, 1]),
    ):
        values = fixed_speeds(text, 2)
        assert values is not None
        assert values.tolist() == expected
    with pytest.raises(ConfigError, match="3 numbers for 2 ranks"):
        fixed_speeds("1,1,1", 2)


@pytest.mark.parametrize("text", ["", "1.0,", "0,1", "-1", "1.5", "fast", "nan,1", "1;1", "AUTO"])
def test_other_speeds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be auto or equal, or one number per rank"):
        parse_speeds(text)
