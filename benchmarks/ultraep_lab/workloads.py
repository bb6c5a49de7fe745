"""Synthetic traces: how popular each expert is over time, and tokens drawn from that.

Every layer has popularity weights; a token's experts are drawn from them without replacement. The
skew of the weights is set so that the expected imbalance on contiguous masters, over a given number
of ranks, is a given one:

zipf    the n-th most popular expert has weight n ** -s, experts in random order (Zipf's law)
switch  two zipf workloads of different experts take turns: the domain of the text changes
burst   mildly skewed, and every other period sharply so, by other experts each time
rotate  zipf, and all weights move on by one rank every period: the hot spot travels

The probability that a token chooses an expert of weight w is 1 - exp(-w t), with t such that the
probabilities sum to top-k (exponential clocks; exact for many experts).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.errors import TraceError
from ultraep_lab.integers import integers
from ultraep_lab.store import MAX_BYTES
from ultraep_lab.trace import LoadTrace, Trace

Kind = Literal["zipf", "switch", "burst", "rotate"]
KINDS = get_args(Kind)
Weights = NDArray[np.float64]
WeightsOf = Callable[[Weights], Weights]  # skews (N,) -> weights (N, E)

SKEWS = np.linspace(0.0, 6.0, 121)
ORDERS = 32  # random orders tried until one can reach the imbalance
BURST_REST = 0.15  # part of a burst's excess imbalance that is there between bursts too


@dataclass(frozen=True)
class Workload:
    """What to make; ``WorkloadOptions`` checks it."""

    kind: Kind = "zipf"
    num_experts: int = 128  # E, a multiple of R
    top_k: int = 8  # K
    num_layers: int = 8
    num_tokens: int = 16384
    num_ranks: int = 8  # R, that the imbalance is meant for
    period: int = 4096  # tokens between changes
    seed: int = 0
    imbalance: float = 2.0  # expected max/mean over ranks
    straggler: float = 1.0  # speed of the last rank, where others have 1


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one popularity."""

    num_tokens: int
    weights: Weights  # (layers, E), positive


def segments(workload: Workload) -> Iterator[Segment]:
    """The workload in order of time; its tokens add up to ``num_tokens``.

    Raises TraceError where the imbalance cannot be reached with these experts and ranks.
    """
    pictures = popularities(workload)
    if len(pictures) == 1:
        yield Segment(workload.num_tokens, pictures[0])
        return
    for index, start in enumerate(range(0, workload.num_tokens, workload.period)):
        length = min(workload.period, workload.num_tokens - start)
        yield Segment(length, pictures[index % len(pictures)])


def popularities(workload: Workload) -> list[Weights]:
    """The weights (layers, E) that take turns, ``period`` tokens each; one where nothing changes.

    Raises TraceError as ``segments``.
    """
    rng, wanted = np.random.default_rng([workload.seed, 1]), workload.imbalance
    if workload.kind == "burst":
        rest = _layers(workload, 1 + (wanted - 1) * BURST_REST, rng)
        return [p for _ in range(4) for p in (rest, _layers(workload, wanted, rng))]
    if workload.kind == "switch":
        return [_layers(workload, wanted, rng) for _ in range(2)]
    weights = _layers(workload, wanted, rng)
    if workload.kind != "rotate":
        return [weights]
    masters = workload.num_experts // workload.num_ranks
    return [np.roll(weights, step * masters, axis=1) for step in range(workload.num_ranks)]


def _layers(workload: Workload, wanted: float, rng: np.random.Generator) -> Weights:
    return np.stack([_calibrated(workload, wanted, rng) for _ in range(workload.num_layers)])


def _zipf(rng: np.random.Generator, num_experts: int) -> WeightsOf:
    place = np.log1p(rng.permutation(num_experts).astype(np.float64))
    return lambda skews: np.exp(-np.outer(skews, place))


def _calibrated(workload: Workload, wanted: float, rng: np.random.Generator) -> Weights:
    """Weights (E,) of the least skew whose expected imbalance is ``wanted``."""
    highest = 1.0
    for _ in range(ORDERS):
        weights_of = _zipf(rng, workload.num_experts)
        reached = _expected_imbalance(weights_of(SKEWS), workload)
        highest = max(highest, float(reached.max()))
        enough = np.flatnonzero(reached >= wanted - 1e-9)
        if enough.size:
            low, high = SKEWS[max(0, enough[0] - 1)], SKEWS[enough[0]]
            return _refined(weights_of, workload, wanted, low, high)
    raise TraceError(
        f"--imbalance = {wanted} cannot be reached with {workload.num_experts} experts, top-"
        f"{workload.top_k}, {workload.num_ranks} ranks; the highest found was {highest:.2f}"
    )


def _refined(
    weights_of: WeightsOf, workload: Workload, wanted: float, low: float, high: float
) -> Weights:
    """Weights (E,) of the first skew from ``low`` to ``high`` that reaches ``wanted``."""
    for _ in range(2):  # each narrows the gap 32 times
        skews = np.linspace(low, high, 33)
        reached = _expected_imbalance(weights_of(skews), workload)
        first = int((reached >= wanted - 1e-9).argmax())
        low, high = skews[max(0, first - 1)], skews[first]
    return np.asarray(weights_of(np.array([high]))[0])


def _expected_imbalance(weights: Weights, workload: Workload) -> Weights:
    """Max/mean over ranks of the expected load, every expert on its master: (N, E) -> (N,)."""
    chance = chances(weights, workload.top_k)
    rank_chance = chance.reshape(len(weights), workload.num_ranks, -1).sum(2)
    return np.asarray(rank_chance.max(1) / rank_chance.mean(1))


def chances(weights: Weights, top_k: int) -> Weights:
    """Probabilities (N, E) that a token chooses each expert; each row sums to ``top_k``."""
    if top_k == weights.shape[1]:
        return np.ones_like(weights)
    low, high = np.log(1e-12 / weights.max(1)), np.log(1e3 / weights.min(1))
    for _ in range(40):
        middle = (low + high) / 2
        few = -np.expm1(-weights * np.exp(middle)[:, None]).sum(1) < top_k
        low, high = np.where(few, middle, low), np.where(few, high, middle)
    return np.asarray(-np.expm1(-weights * np.exp(high)[:, None]))


CHUNK = 1 << 20  # weights drawn at once
SEQUENCE_TOKENS = 256

BASIS = (
    "experts drawn without replacement from popularity weights, each layer and token on its own; "
    "the weights' skew is set so that the expected imbalance on contiguous masters is the given one"
)


def make_trace(workload: Workload) -> Trace:
    """Draw every token's experts. Its metadata says what it was made from.

    Raises TraceError: too large, or the imbalance cannot be reached.
    """
    dtype = np.dtype(np.uint8 if workload.num_experts <= 256 else np.uint16)
    num_bytes = workload.num_tokens * workload.num_layers * workload.top_k * dtype.itemsize
    _require_readable(num_bytes)
    topk_ids = np.empty((workload.num_tokens, workload.num_layers, workload.top_k), dtype)
    rng = np.random.default_rng([workload.seed, 2])
    first = 0
    for segment in segments(workload):
        _draw(segment, rng, topk_ids[first : first + segment.num_tokens])
        first += segment.num_tokens
    lengths = np.full(-(-workload.num_tokens // SEQUENCE_TOKENS), SEQUENCE_TOKENS, np.int32)
    lengths[-1] -= lengths.sum() - workload.num_tokens
    metadata: dict[str, Any] = {
        "source": "ultraep-serve make-trace",
        "basis": BASIS,
        "workload": asdict(workload),
    }
    if workload.straggler < 1:
        metadata["speeds"] = [*[1.0] * (workload.num_ranks - 1), workload.straggler]
    return Trace(topk_ids, lengths, workload.num_experts, metadata=metadata)


def _require_readable(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise TraceError(f"the trace would take {num_bytes} bytes, at most {MAX_BYTES} are read")


def _draw(segment: Segment, rng: np.random.Generator, out: NDArray[np.unsignedinteger]) -> None:
    """Fill ``out`` (T, layers, K), the first choice first.

    Exponential clocks: expert e rings after Exp(weight_e), and the first K to ring are a draw
    without replacement.
    """
    num_layers, num_experts = segment.weights.shape
    top_k = out.shape[2]
    step = max(1, CHUNK // num_experts)
    for layer in range(num_layers):
        for start in range(0, segment.num_tokens, step):
            part = out[start : start + step, layer]
            rings = rng.standard_exponential((len(part), num_experts)) / segment.weights[layer]
            chosen = np.argpartition(rings, top_k - 1, axis=1)[:, :top_k]
            order = np.argsort(np.take_along_axis(rings, chosen, 1), axis=1)
            part[:] = np.take_along_axis(chosen, order, 1)


def drawn_loads(
    totals: Mapping[str, Any],
    num_ranks: int,
    assignments: int,
    num_batches: int,
    seed: int,
) -> LoadTrace:
    """Batches from ``totals``, by layer the assignments (E,) of a whole run.

    Every rank's ``assignments`` of a layer are multinomial by the layer's totals, so experts are as
    popular in every batch as in the run. Raises TraceError where the totals are no such numbers.
    """
    counts = integers("the table of totals", [*totals.values()], (2,), range(1 << 48)).astype(
        np.float64
    )
    if not counts.any(1).all():
        raise TraceError("the totals of a layer must not all be 0")
    if counts.shape[1] % num_ranks:
        raise TraceError(f"{counts.shape[1]} experts cannot be divided by {num_ranks} ranks")
    _require_readable(4 * counts.size * num_batches * num_ranks)
    rng = np.random.default_rng(seed)
    loads = np.stack(
        [
            rng.multinomial(assignments, layer / layer.sum(), size=(num_batches, num_ranks))
            for layer in counts
        ],
        axis=1,
    )
    metadata = {"source": "ultraep-serve make-trace", "basis": "drawn from totals", "seed": seed}
    return LoadTrace(loads, metadata={**metadata, "layers": [*totals]})
