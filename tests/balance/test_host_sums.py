"""HostSums: the same sums on all ranks, turn after turn, and a typed error where a rank is gone."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ultraep_kernels.host import combine

from tests.support.hosts import engine_group
from tests.support.ranks import outcomes_of_ranks, run_ranks
from ultraep_serve.balance.host import sums as host_sums
from ultraep_serve.balance.host.sums import HostSums
from ultraep_serve.errors import ConfigError, PeerTimeoutError

LONG = 60.0
MOST, TOP_K, HIDDEN = 700, 3, 24
TURNS = (65, 3, MOST, 0, MOST, 1, 64, 1, 2, 500, 500)  # tokens


def join(
    run_path: Path,
    rank: int,
    num_ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = LONG,
) -> HostSums | None:
    group = engine_group(run_path, rank, num_ranks).on_host
    return HostSums.connect(group, torch.Size((MOST, TOP_K, HIDDEN)), dtype, seconds)


def made_up(
    num_ranks: int, turn: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rank (T, K) of each assignment, its row (T, K, H), and the sums (T, H) of tokens' rows.

    Every other turn has fewer assignments to a token than there is room for.
    """
    generator = torch.Generator().manual_seed(turn)
    shape = TURNS[turn], TOP_K - turn % 2
    owner = torch.randint(-1, num_ranks, shape, generator=generator)
    rows = torch.randn(*shape, HIDDEN, generator=generator).to(dtype)
    total = torch.zeros(shape[0], HIDDEN)
    for k in range(shape[1]):
        total += torch.where(owner[:, k, None] >= 0, rows[:, k], 0).float()
    return owner, rows, total.to(dtype)


def give(sums: HostSums, own: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the ``rows`` (T, K, H) that are this rank's ``own`` (T, K)."""
    place, room = sums.rows(own.shape)
    numbers = torch.arange(int(own.sum()), dtype=torch.int32)
    place.fill_(-1)[own] = numbers.flip(0)
    room[numbers.flip(0)] = rows[own]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_ranks", "most_threads"), [(1, 4), (2, 4), (3, 4), (2, 0)])
def test_every_rank_gets_the_whole_sum_rounded_once(
    run_path: Path, num_ranks: int, most_threads: int, dtype: torch.dtype
) -> None:
    right = run_ranks(add_many, num_ranks, run_path, num_ranks, most_threads, dtype)
    assert right == [[True] * len(TURNS)] * num_ranks


def add_many(
    rank: int, run_path: Path, num_ranks: int, most_threads: int, dtype: torch.dtype
) -> list[bool]:
    vars(combine)["MOST_THREADS"] = most_threads
    sums = join(run_path, rank, num_ranks, dtype)
    assert sums is not None
    right = []
    for turn in range(len(TURNS)):
        owner, rows, expected = made_up(num_ranks, turn, dtype)
        give(sums, owner == rank, rows)
        right.append(torch.equal(sums.total(owner.shape), expected))
    return right


def test_few_tokens_and_more_than_there_is_room_for_are_left_to_the_engine(run_path: Path) -> None:
    assert run_ranks(ask, 1, run_path) == [[False, False, True, True, False, False]]


def ask(rank: int, run_path: Path) -> list[bool]:
    sums = join(run_path, rank, 1)
    assert sums is not None
    tokens = [(0, TOP_K), (64, TOP_K), (65, TOP_K), (MOST, 1), (MOST + 1, 1), (MOST, TOP_K + 1)]
    return [sums.takes(torch.Size(shape)) for shape in tokens]


@pytest.mark.parametrize("num_tokens", [1, MOST])
def test_a_rank_killed_before_it_gave_its_rows_is_noticed(run_path: Path, num_tokens: int) -> None:
    outcomes = outcomes_of_ranks(die_in_the_third_turn, 2, run_path, num_tokens)
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].error == "PeerTimeoutError"
    assert "waits for rows of a layer's output: rank 1 has died" in outcomes[0].message
    assert not multiprocessing.active_children()


def die_in_the_third_turn(rank: int, run_path: Path, num_tokens: int) -> None:
    sums = join(run_path, rank, 2)
    assert sums is not None
    for turn in range(3):
        place, _ = sums.rows(shape := torch.Size((num_tokens, TOP_K)))
        place.fill_(-1)
        if rank == 1 and turn == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sums.total(shape)


def test_a_stopped_rank_is_waited_for_as_long_as_configured(run_path: Path) -> None:
    message, _ = run_ranks(stop_in_the_second_turn, 2, run_path)
    assert "waits for rows of a layer's output: rank 1 did not answer within 0.5 s" in message


def stop_in_the_second_turn(rank: int, run_path: Path) -> str:
    """Rank 1, which the other one wakes in the end."""
    sums = join(run_path, rank, 2, seconds=0.5)
    assert sums is not None
    (run_path / f"process-{rank}").write_text(str(os.getpid()))
    nothing = torch.Size((0, TOP_K))
    sums.total(nothing)
    sums.end_loading()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    with pytest.raises(PeerTimeoutError) as error:
        sums.total(nothing)
    os.kill(int((run_path / "process-1").read_text()), signal.SIGCONT)
    return str(error.value)


def refuse(_name: str) -> int:
    raise ConfigError("no")


REPLACED: dict[str, Callable[..., Any]] = {
    "host_identity": lambda shared: 1,  # another host's
    "shareable_memory": refuse,
    "open_memory_of": lambda process, descriptor: os.open("/", os.O_RDONLY),  # not to be mapped
}


@pytest.mark.parametrize("name", REPLACED)
def test_where_one_rank_shares_no_memory_all_leave_it_to_the_engine(
    run_path: Path, name: str
) -> None:
    assert run_ranks(join_without, 3, run_path, name) == [True] * 3


def join_without(rank: int, run_path: Path, name: str) -> bool:
    if rank == 1:
        vars(host_sums)[name] = REPLACED[name]
    return join(run_path, rank, 3) is None
