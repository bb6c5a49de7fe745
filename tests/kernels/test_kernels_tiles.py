"""What experts give, computed by tiles of AMX, against the formula in float64."""

from collections.abc import Iterator

import pytest
import torch
from ultraep_kernels.host import tiles as kernels
from ultraep_kernels.host.tiles import INPUTS, can_compute, compute_experts, packed

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX"
)
SIZES = (  # local experts, H, I, tokens, K
    (1, 32, 32, 1, 1),
    (2, 32, 32, 0, 2),
    (3, 32, 96, 40, 2),
    (6, 96, 64, 500, 3),
    (2, 2048, 768, 700, 2),  # lines for every row; more tokens of an expert than one part has
    (5, 64, 2080, 30, 4),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(
    num_experts: int, hidden: int, inner: int, num_tokens: int, top_k: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Matrices, and a batch: tokens, weights and experts, of which some are another rank's."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    w13 = (random(num_experts, 2 * inner, hidden) * 4 / hidden**0.5).bfloat16()
    w2 = (random(num_experts, hidden, inner) / inner**0.5).bfloat16()
    local = torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator).int()
    local[local == 1] = 0  # an expert without tokens
    x = random(num_tokens, hidden).bfloat16()
    return [w13, w2], [x, torch.rand(num_tokens, top_k, generator=generator), local]


def computed(
    matrices: list[torch.Tensor], batch: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and rows, of which only so many are written as there are assignments."""
    w13, w2 = map(packed, matrices)
    assert can_compute(w13, w2)
    x, weights, local = batch
    place = torch.full_like(local, 99, dtype=torch.int32)
    rows = torch.full((local.numel() + 1, x.shape[1]), 7.0).bfloat16()
    compute_experts(x, weights, local, (w13, w2), place, rows)
    return place, rows


@needs_amx
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_give_what_the_formula_says(sizes: tuple[int, ...], wide: bool) -> None:
    matrices, (x, weights, local) = make(*sizes)
    place, rows = computed(matrices, [x, weights, local.long() if wide else local])
    own = local.flatten() >= 0
    assert place.flatten()[own].tolist() == list(range(int(own.sum())))
    assert (place.flatten()[~own] == -1).all()
    assert (rows[int(own.sum()) :] == 7).all()
    tokens = torch.arange(len(x)).repeat_interleave(local.shape[1])[own]
    for expert, (w13, w2) in enumerate(zip(*(of_all.double() for of_all in matrices), strict=True)):
        chosen = local.flatten()[own] == expert
        gate, up = (x[tokens[chosen]].double() @ w13.T).chunk(2, dim=1)
        inner = (gate * gate.sigmoid() * up).bfloat16().double()
        expected = weights.flatten()[own][chosen].double()[:, None] * (inner @ w2.T)
        error = rows[: len(chosen)][chosen].double() - expected
        assert (error.norm(dim=1) <= 4e-3 * expected.norm(dim=1)).all()


@needs_amx
def test_a_row_does_not_depend_on_those_beside_it() -> None:
    matrices, batch = make(6, 96, 64, 300, 3)
    x, weights, local = batch
    _, rows = computed(matrices, batch)
    for some in (slice(0, 1), slice(7, 24), slice(100, 300)):
        _, alone = computed(matrices, [part[some] for part in batch])
        first = int((local[: some.start] >= 0).sum())
        number = int((local[some] >= 0).sum())
        assert torch.equal(alone[:number], rows[first : first + number])
    x[50] = torch.nan
    place, broken = computed(matrices, [x, weights, local])
    others = torch.ones(len(broken), dtype=torch.bool)
    others[place[50][place[50] >= 0].long()] = False
    assert others.sum() < len(broken)
    assert torch.equal(broken[others], rows[others])
    assert broken[~others].isnan().all()


@needs_amx
def test_gates_of_every_size() -> None:
    """Of an expert whose gate is one input, whose up is another, and that gives their product."""
    gates = torch.tensor([0.0, 1e-30, -1e-3, 0.5, -0.5, 3, -9, 30, -80, -100, 3e4, -3e4, torch.inf])
    w13, w2 = torch.zeros(1, 2 * INPUTS, INPUTS), torch.zeros(1, INPUTS, INPUTS)
    w13[0, 0, 0] = w13[0, INPUTS, 1] = w2[0, 0, 0] = 1
    x = torch.zeros(len(gates), INPUTS)
    x[:, 0], x[:, 1] = gates, 1
    x = x.bfloat16()
    expert = torch.zeros(len(gates), 1, dtype=torch.int32)
    matrices = [w13.bfloat16(), w2.bfloat16()]
    _, rows = computed(matrices, [x, torch.ones(expert.shape), expert])
    exact = torch.nn.functional.silu(x[:, 0].double())
    finite = exact.isfinite()
    assert torch.allclose(rows[:-1, 0].double()[finite], exact[finite], rtol=2**-8, atol=1e-30)
    assert rows[len(gates) - 1, 0].isnan()  # infinity times the zeros of the other inputs


@needs_amx
@pytest.mark.parametrize("number", [1, 16, 17, 32, 33, 160, 161, 320, 321, 353])
def test_blocks_and_parts_of_every_size(number: int) -> None:
    """Of one expert's tokens, of which a part has 160."""
    (w13, w2), _ = make(1, 2048, 768, 1, 1)
    x = torch.zeros(number, 2048)
    x[torch.arange(number), torch.arange(number)] = 1
    local = torch.zeros(number, 1, dtype=torch.int32)
    _, rows = computed([w13, w2], [x.bfloat16(), torch.ones(number, 1), local])
    gate, up = w13[0].double()[:, :number].T.chunk(2, dim=1)
    inner = (gate * gate.sigmoid() * up).bfloat16().double()
    expected = inner @ w2[0].double().T
    assert ((rows[:number].double() - expected).norm(dim=1) <= 4e-3 * expected.norm(dim=1)).all()


@needs_amx
def test_tokens_of_other_types_and_sizes_are_refused() -> None:
    matrices, (x, weights, local) = make(2, 64, 32, 5, 2)
    for wrong in (x.half(), x.float(), x[:, :32]):
        with pytest.raises(TypeError, match="experts take 64 numbers of "):
            computed(matrices, [wrong, weights, local])


def test_other_experts_are_left_to_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    w13, w2 = make(2, 64, 32, 1, 1)[0]
    assert not can_compute(w13.half(), w2.half())
    assert not can_compute(w13[..., :48], w2[:, :48])
    assert not can_compute(w13[:, :32], w2)
    for name, value in (("MOST_THREADS", 0), ("llvm_version_info", (15, 0, 7))):
        with monkeypatch.context() as patched:
            patched.setattr(kernels, name, value)
            assert not can_compute(w13, w2)
