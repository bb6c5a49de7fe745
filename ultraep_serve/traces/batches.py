"""A trace cut into batches as a server would see them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.traces.errors import TraceError
from ultraep_serve.traces.trace import Integers, LoadTrace, Trace
from ultraep_serve.types import IntArray

__all__ = ["batches", "num_batches"]


def num_batches(trace: Trace | LoadTrace, batch_tokens: int | None) -> int:
    """Whole batches in the trace; arguments and errors as ``batches``."""
    if isinstance(trace, LoadTrace):
        if batch_tokens is not None:
            raise TraceError("a trace of loads has its own batches; leave --batch-tokens out")
        return trace.num_batches
    if batch_tokens is None or batch_tokens < 1:
        raise TraceError(f"batch tokens = {batch_tokens} is not legal; legal: 1 or more")
    if trace.num_tokens < batch_tokens:
        raise TraceError(
            f"the trace has {trace.num_tokens} tokens, less than one batch of {batch_tokens}"
        )
    return trace.num_tokens // batch_tokens


def batches(
    trace: Trace | LoadTrace, batch_tokens: int | None, num_ranks: int
) -> Iterator[IntArray]:
    """Loads int32 (layers, R, E) of each batch.

    A batch is ``batch_tokens`` consecutive tokens, split evenly and contiguously over the R
    source ranks; what is left at the end is no batch. A trace of loads has its own batches: where
    its source ranks are not R, or not known, they are merged or split evenly.

    Raises TraceError: the trace is shorter than a batch, or too large for int32.
    """
    count = num_batches(trace, batch_tokens)
    for index in range(count):
        if isinstance(trace, LoadTrace):
            yield _as_loads(_spread(trace.loads[index], num_ranks))
        else:
            assert batch_tokens is not None
            chosen = trace.topk_ids[index * batch_tokens : (index + 1) * batch_tokens]
            yield _count(chosen, num_ranks, trace.num_experts)


def _count(topk_ids: Integers, num_ranks: int, num_experts: int) -> IntArray:
    """Ids (T, layers, K) -> loads (layers, R, E)."""
    num_tokens, num_layers, _ = topk_ids.shape
    bounds = [part[0] for part in np.array_split(np.arange(num_tokens), num_ranks) if part.size]
    source = np.searchsorted(bounds, np.arange(num_tokens), side="right") - 1
    loads = np.empty((num_layers, num_ranks, num_experts), np.int64)
    for layer in range(num_layers):
        ids = topk_ids[:, layer].astype(np.int64)
        cells = (source[:, None] * num_experts + ids)[ids >= 0]
        counted = np.bincount(cells, minlength=num_ranks * num_experts)
        loads[layer] = counted.reshape(num_ranks, num_experts)
    return _as_loads(loads)


def _spread(recorded: Integers, num_ranks: int) -> NDArray[np.int64]:
    """Loads (layers, E) or (layers, Q, E) -> (layers, R, E)."""
    loads = recorded.astype(np.int64)
    if loads.ndim == 2:
        loads = loads[:, None]
    num_layers, num_sources, num_experts = loads.shape
    if num_sources == num_ranks:
        return loads
    if num_sources % num_ranks == 0:
        grouped = loads.reshape(num_layers, num_ranks, num_sources // num_ranks, num_experts)
        return np.asarray(grouped.sum(2))
    if num_ranks % num_sources != 0:
        loads = loads.sum(1, keepdims=True)
    parts = num_ranks // loads.shape[1]
    split, rest = loads // parts, loads % parts
    # The odd ones go on where those of the expert before stopped, so all parts get as many.
    start = rest.cumsum(-1) - rest
    turn = (np.arange(parts)[:, None] - start[:, :, None]) % parts
    pieces = split[:, :, None] + (turn < rest[:, :, None])
    return np.asarray(pieces.reshape(num_layers, num_ranks, num_experts))


def _as_loads(loads: Integers) -> IntArray:
    if loads.size and loads.sum((-2, -1)).max() > np.iinfo(np.int32).max:
        raise TraceError("a layer of one batch has more than 2**31 assignments; cut the trace")
    return loads.astype(np.int32)
