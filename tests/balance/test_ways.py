"""How ranks choose a way of computing experts: by what all of them have measured, and alike."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hosts import engine_group
from tests.support.ranks import outcomes_of_ranks, run_ranks
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import ways as module
from ultraep_serve.engines.common.cpu_experts import Rows, rows_by_expert
from ultraep_serve.engines.common.ways import (
    NAMES,
    ROWS,
    ChosenWays,
    Sample,
    Way,
    choose_for_kinds,
    decide,
    is_exact,
)
from ultraep_serve.errors import ConfigError

NEVER = module._NEVER
SAMPLE = Sample(
    num_local_experts=4,
    num_ranks=2,
    experts_per_token=2,
    hidden_size=8,
    dtype=torch.bfloat16,
)
# Milliseconds by rank, way and number of rows: each rank alone would choose otherwise.
TIMES = (
    {"kernel": (1, 9, 30), "products": (5, 5, 10), "sums": (1, 1, 1)},
    {"kernel": (1, 9, 30), "products": (5, 10, 11), "float32": (1, 1, 1), "sums": (2, 2, 2)},
)


def way(name: str) -> Way:
    return Way(name, alone, sums=name == "sums")


def alone(x: torch.Tensor, weights: torch.Tensor, local: torch.Tensor, outputs: Rows) -> None:
    """Every assignment by itself, which no other one changes."""
    places, _ = rows_by_expert(local, SAMPLE.num_local_experts)
    rows = x[places // local.shape[1]] * weights.reshape(-1, 1)[places]
    outputs.place.fill_(-1).view(-1)[places] = torch.arange(len(places), dtype=torch.int32)
    outputs.rows[: len(rows)] = rows


def together(x: torch.Tensor, weights: torch.Tensor, local: torch.Tensor, outputs: Rows) -> None:
    alone(x, weights, local, outputs)
    outputs.rows.add_(int((local >= 0).sum()) % 2)


def times_of(taken: dict[str, int], *calls: Any) -> list[int]:
    return [taken[call.func.__self__.name] for call in calls]


def choose_on_rank(rank: int, run_path: Path, settings: dict[str, Any]) -> Any:
    times = TIMES[rank]

    def measure(ways: list[Way], sample: Sample) -> Any:
        found = np.full((len(NAMES), len(ROWS) + 1), NEVER, np.int64)
        for own in ways:
            found[NAMES.index(own.name)] = [*(ms * 10**6 for ms in times[own.name]), 0]
        found[NAMES.index("sums"), -1] = NEVER
        return found

    module._measure = measure
    group = engine_group(run_path, rank, 2).on_host
    ways = [way(name) for name in NAMES if name in times]
    config = BalanceConfig(**settings)
    (chosen,), found = choose_for_kinds([ways], [SAMPLE], group, config)
    return tuple((rows, way.name) for rows, way in chosen.begin), found.detail


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ((0, "kernel"), (74, "products"))),
        ({"numerics": "engine"}, ((0, "kernel"), (12, "sums"))),
        ({"experts": "products"}, ((0, "products"),)),
        ({"experts": "sums", "numerics": "engine"}, ((0, "sums"),)),
    ],
)
def test_ranks_that_measure_otherwise_choose_alike(
    run_path: Path, settings: dict[str, Any], names: tuple[tuple[int, str], ...]
) -> None:
    first, second = run_ranks(choose_on_rank, 2, run_path, settings)
    assert first == second
    assert first[0] == names
    if "experts" not in settings:
        times = "kernel 1 9 30, products 5 10 11, sums (not exact) 2 2 2"
        assert first[1].endswith(f"; ms at 4 64 256 rows: {times}")


def test_a_way_that_one_rank_does_not_have_is_refused_on_all(run_path: Path) -> None:
    for outcome in outcomes_of_ranks(choose_on_rank, 2, run_path, {"experts": "float32"}):
        assert outcome.error == "ConfigError"
        assert "--experts float32" in outcome.message
        assert "choose from auto, kernel, products, sums" in outcome.message


def test_rounding_sums_has_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="add --numerics engine"):
        BalanceConfig(experts="sums")


def test_what_is_exact_is_seen() -> None:
    batch = SAMPLE.batch(ROWS[-1])
    assert is_exact(way("kernel"), batch)
    assert not is_exact(Way("products", together), batch)


def test_a_way_is_measured_and_found_exact_or_not() -> None:
    ways = [Way("kernel", together), Way("products", alone), Way("float32", together), way("sums")]
    found = module._measure(ways, SAMPLE)
    assert (found[:, :-1] > 0).all()
    # The first is the engine's own, which nothing can be held against.
    assert (found[:, -1] == 0).tolist() == [True, True, False, False, False]


def test_what_is_compiled_on_the_first_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def compute(name: str, *batch: Any) -> None:
        called.append(name)
        alone(*batch)

    names = ("kernel", "products")
    ways = [Way(name, partial(compute, name)) for name in names]
    before: list[set[str]] = []

    def timed(*calls: Any) -> list[int]:
        before.append(set(called))
        return [1] * len(calls)

    monkeypatch.setattr(module, "nanoseconds_of", timed)
    module._measure(ways, SAMPLE)
    assert before[0] == set(names)


def test_ways_take_turns_when_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is long is not run again."""
    called: list[str] = []
    monkeypatch.setattr(module, "_LONG", 0.05)

    def long() -> None:
        called.append("long")
        time.sleep(0.1)

    found = module.nanoseconds_of(partial(called.append, "a"), long, partial(called.append, "b"))
    assert called == ["a", "long", "b"] + ["a", "b"] * (module._RUNS - 1)
    assert found[1] >= 1e8


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """It is compared with what may be taken: what is fast and not exact makes nothing slow."""
    ways = [way("kernel"), Way("products", alone if exact else together), way("float32")]
    taken = {"kernel": 90, "products": 10, "float32": 31}
    monkeypatch.setattr(module, "nanoseconds_of", partial(times_of, taken))
    found = module._measure(ways, SAMPLE)
    assert found[:3, :2].tolist() == [[90] * 2, [10] * 2, [31] * 2]
    assert found[:3, 2].tolist() == ([NEVER, 10, NEVER] if exact else [90, 10, 31])


def test_what_is_hopeless_with_few_rows_is_not_tried_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = [way("kernel"), way("products"), way("float32")]
    taken = {"kernel": 310, "products": 10, "float32": 301}
    monkeypatch.setattr(module, "nanoseconds_of", partial(times_of, taken))
    found = module._measure(ways, SAMPLE)
    assert found[:3, 1].tolist() == [310, 10, NEVER]  # the engine's own may have to be taken


@pytest.mark.parametrize(
    ("kernel", "products", "chosen"),
    [(100, 98, "kernel"), (100, 96, "products"), (98, 100, "kernel"), (NEVER, 100, "products")],
)
def test_the_earlier_way_wins_where_both_take_nearly_as_long(
    kernel: int, products: int, chosen: str
) -> None:
    times = np.full((len(NAMES), 1), NEVER)
    times[:2, 0] = kernel, products
    assert decide(times, np.ones(len(NAMES), bool)) == ((0, chosen),)


def test_where_no_exact_way_was_measured_another_is_taken() -> None:
    times = np.array([[1, NEVER], [NEVER, 5], [NEVER, NEVER], [NEVER, 9]])
    found = decide(times, np.array([True, False, False, False]))
    assert [name for _, name in found] == ["kernel", "products"]
    assert ROWS[0] < found[1][0] <= ROWS[1]


@pytest.mark.parametrize(
    ("kernel", "products", "first"),
    [
        ((1, 14, 15), (5, 10, 10), 34),  # half way from 4 to 64
        ((1, 10, 15), (1, 15, 10), 160),  # half way from 64 to 256
        ((1, 6, 15), (9, 6, 9), 64),  # as fast there
        ((1, 10, 20), (5, 10, 20), None),
    ],
)
def test_a_way_begins_where_the_times_of_both_cross(
    kernel: tuple[int, ...], products: tuple[int, ...], first: int | None
) -> None:
    times = np.full((len(NAMES), len(ROWS)), NEVER)
    times[:2] = kernel, products
    names = decide(times, np.ones(len(NAMES), bool))
    assert names == ((0, "kernel"), *([] if first is None else [(first, "products")]))


def test_batches_go_the_way_that_has_begun() -> None:
    begin = tuple(zip((0, 64, 256), map(way, ("kernel", "products", "float32")), strict=True))
    chosen = ChosenWays(begin)
    found = [chosen.of(number).name for number in (0, 4, 63, 64, 255, 256, 10**6)]
    assert found == ["kernel"] * 3 + ["products"] * 2 + ["float32"] * 2


def test_samples_have_the_rows_that_they_say() -> None:
    for ranks, top_k in ((2, 8), (64, 8), (2, 1)):
        sample = Sample(16, ranks, top_k, 4, torch.float32)
        x, weights, local = sample.batch(256)
        numbers = torch.bincount(local[local >= 0])
        assert numbers.float().mean() == pytest.approx(256, rel=0.1)
        assert numbers.numel() == module._MOST_EXPERTS
        assert x.shape[0] == weights.shape[0] == local.shape[0]
