"""Workload -> token-level trace, the same for the same seed."""

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.traces.errors import TraceError
from ultraep_serve.traces.store import MAX_BYTES
from ultraep_serve.traces.trace import Trace
from ultraep_serve.traces.workloads import Segment, Workload, segments

__all__ = ["make_trace"]

CHUNK = 1 << 20  # weights drawn at once
SEQUENCE_TOKENS = 256

BASIS = (
    "experts drawn without replacement from popularity weights, each layer and token on its own; "
    "the weights' skew is set so that the expected imbalance on contiguous masters is as asked"
)


def make_trace(workload: Workload) -> Trace:
    """Draw every token's experts. Its metadata says what it was made from.

    Raises TraceError: too large, or the imbalance cannot be reached.
    """
    dtype = np.dtype(np.uint8 if workload.num_experts <= 256 else np.uint16)
    num_bytes = workload.num_tokens * workload.num_layers * workload.top_k * dtype.itemsize
    if num_bytes > MAX_BYTES:
        raise TraceError(f"the trace would take {num_bytes} bytes, at most {MAX_BYTES} are read")
    topk_ids = np.empty((workload.num_tokens, workload.num_layers, workload.top_k), dtype)
    rng = np.random.default_rng([workload.seed, 2])
    first = 0
    for segment in segments(workload):
        _draw(segment, rng, topk_ids[first : first + segment.num_tokens])
        first += segment.num_tokens
    lengths = np.full(-(-workload.num_tokens // SEQUENCE_TOKENS), SEQUENCE_TOKENS, np.int32)
    lengths[-1] -= lengths.sum() - workload.num_tokens
    metadata = {"source": "ultraep-serve make-trace", "basis": BASIS, "workload": asdict(workload)}
    return Trace(topk_ids, lengths, workload.num_experts, metadata=metadata)


def _draw(segment: Segment, rng: np.random.Generator, out: NDArray[np.unsignedinteger]) -> None:
    """Fill ``out`` (T, layers, K), most wanted expert first.

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
