"""combine against sums one row after the other, with few threads or many; rows of one rank."""

import pytest
import torch
from ultraep_kernels.host import combine as kernels
from ultraep_kernels.host.combine import combine, own_experts, own_rows

NUM_TOKENS, TOP_K, HIDDEN = 40, 3, 21
BFLOAT16 = torch.bfloat16
DTYPES = (BFLOAT16, torch.float16, torch.float32)


def given(num_ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and rows of ranks, of each token some, in an order of its own on each rank.

    What is no row of a token is not a number. Both are parts of something larger, as in memory that
    ranks share.
    """
    generator = torch.Generator().manual_seed(num_ranks)
    room = torch.full((num_ranks, 2 * NUM_TOKENS * TOP_K, HIDDEN), float("nan"), dtype=dtype)
    rows = room[:, : NUM_TOKENS * TOP_K]
    place = torch.full((num_ranks, NUM_TOKENS + 5, TOP_K), -1, dtype=torch.int32)[:, 5:]
    owner = torch.randint(-1, num_ranks, (NUM_TOKENS, TOP_K), generator=generator)
    owner[:2] = -1  # nobody's
    for rank in range(num_ranks):
        own = owner == rank
        numbers = torch.randperm(rows.shape[1], generator=generator)[: int(own.sum())]
        place[rank][own] = numbers.int()
        rows[rank, numbers] = torch.randn(len(numbers), HIDDEN, generator=generator).to(dtype)
    first = tuple((place >= 0).nonzero()[0].tolist())
    hard = torch.tensor([float("inf"), 3.3e38 if dtype is not torch.float16 else 6e4, 1e-40])
    rows[first[0], place[first], :3] = hard.to(dtype)
    return place, rows


def twin(place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(NUM_TOKENS, HIDDEN)
    for token in range(NUM_TOKENS):
        for k in range(TOP_K):
            for rank, number in enumerate(place[:, token, k].tolist()):
                if number >= 0:
                    total[token] += rows[rank, number].float()
    return total


@pytest.mark.parametrize("num_threads", ["few threads", "many threads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_rows_of_all_ranks_are_added_in_the_order_of_a_tokens_experts(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, dtype: torch.dtype, num_threads: str
) -> None:
    monkeypatch.setattr(kernels, "MOST_THREADS", 1 << 20 if num_threads == "few threads" else 0)
    monkeypatch.setattr(kernels, "_AT_ONCE", 7 * HIDDEN)
    place, rows = given(num_ranks, dtype)
    expected = twin(place, rows)
    assert not expected.isnan().any()
    for to in (torch.float32, dtype):
        total, copy = torch.full((2, NUM_TOKENS, HIDDEN), 7.0, dtype=to)
        assert combine(place, rows, total, copy) is total
        assert torch.equal(total, expected.to(to))
        assert torch.equal(total, copy)
        some = slice(10, 30)
        assert torch.equal(combine(place[:, some], rows, copy[some]), total[some])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens_have_no_sums(dtype: torch.dtype) -> None:
    place, rows = given(2, dtype)
    total = torch.empty(0, HIDDEN, dtype=dtype)
    assert combine(place[:, :0], rows, total, total).numel() == 0


def test_what_is_not_a_number_stays_so() -> None:
    place, rows = given(2, BFLOAT16)
    token = int((place[0] >= 0).nonzero()[0, 0])
    rows[0, place[0, token].max(), 4] = float("nan")
    total = combine(place, rows, torch.empty(NUM_TOKENS, HIDDEN, dtype=BFLOAT16))
    assert total.isnan().nonzero().tolist() == [[token, 4]]


def test_rows_are_rounded_to_their_own_type_alone() -> None:
    place, rows = given(1, BFLOAT16)
    with pytest.raises(TypeError, match=r"rows in torch\.bfloat16 .* not torch\.float16"):
        combine(place, rows, torch.empty(NUM_TOKENS, HIDDEN, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_rank_computes_its_own_experts_alone(dtype: torch.dtype) -> None:
    physical = torch.tensor([[-1, 5, 6], [9, 10, 0]], dtype=dtype)
    local = own_experts(physical, 6, 4)
    assert local.tolist() == [[-1, -1, 0], [3, -1, -1]]
    assert local.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_numbered_in_the_order_of_tokens(dtype: torch.dtype) -> None:
    local = torch.tensor([[-1, 4, -1], [-1, -1, -1], [0, -1, 4]], dtype=dtype)
    place = torch.full(local.shape, 9, dtype=torch.int32)
    tokens, experts, weights = own_rows(local, torch.arange(9.0).view(3, 3), place)
    assert place.tolist() == [[-1, 0, -1], [-1, -1, -1], [1, -1, 2]]
    assert (tokens.tolist(), experts.tolist()) == ([0, 2, 2], [4, 0, 4])
    assert weights.tolist() == [1, 6, 8]
    assert (tokens.dtype, experts.dtype) == (torch.int64, torch.int32)
