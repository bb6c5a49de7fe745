"""The two kinds of trace, per token or per expert, and how they are cut into batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.errors import TraceError
from ultraep_lab.integers import Integers, integer, integers
from ultraep_serve.types import IntArray

PREFILL, DECODE = 0, 1  # values of ``phase``
EXPERTS = range(1, (1 << 16) + 1)  # numbers of experts: a wrong one must not fill memory
IDS = range(-1, EXPERTS[-1])  # of logical experts; -1 is padding
LOADS = range(1 << 31)  # numbers of assignments that int32 holds
Metadata = Mapping[str, Any]  # JSON values; known keys: num_experts, model, layers, basis, speeds


@dataclass(frozen=True)
class Trace:
    """Token level. Raises TraceError where the parts contradict each other."""

    topk_ids: Integers  # (tokens, layers, K) logical experts in token order; -1 is padding
    sequence_lengths: Integers  # (sequences,), sums to tokens
    num_experts: int  # E
    phase: Integers | None = None  # (tokens,) PREFILL or DECODE, where known
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        experts = integer("num_experts", self.num_experts, EXPERTS)
        ids = integers("topk_ids", self.topk_ids, (3,), range(-1, experts))
        lengths = integers("sequence_lengths", self.sequence_lengths, (1,), range(len(ids) + 1))
        if lengths.sum() != len(ids):
            raise TraceError(
                f"sequence_lengths sum to {lengths.sum()}, topk_ids has {len(ids)} tokens"
            )
        phase = _checked_phase(self.phase, len(ids))
        vars(self).update(topk_ids=ids, sequence_lengths=lengths, num_experts=experts, phase=phase)

    @property
    def num_tokens(self) -> int:
        """Tokens in the trace."""
        return int(self.topk_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """MoE layers in the trace."""
        return int(self.topk_ids.shape[1])


@dataclass(frozen=True)
class LoadTrace:
    """Load level. Raises TraceError where the parts contradict each other."""

    loads: Integers  # (batches, layers, R_source, E) or, sources unknown, (batches, layers, E)
    phase: Integers | None = None  # (batches,) PREFILL or DECODE, where known
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        loads = integers("loads", self.loads, (3, 4), LOADS)
        integer("the number of experts", loads.shape[-1], EXPERTS)
        vars(self).update(loads=loads, phase=_checked_phase(self.phase, len(loads)))

    @property
    def num_batches(self) -> int:
        """Captured batches."""
        return int(self.loads.shape[0])

    @property
    def num_layers(self) -> int:
        """MoE layers in the trace."""
        return int(self.loads.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of the model."""
        return int(self.loads.shape[-1])


def count_experts(topk_ids: object) -> int:
    """E, where nothing says it: the highest expert that was chosen is the last one."""
    return max(1, int(integers("topk_ids", topk_ids, (3,), IDS).max(initial=0)) + 1)


def of_phase(trace: Trace | LoadTrace, phase: int) -> Trace | LoadTrace:
    """The PREFILL or DECODE part of ``trace``; all of it where the trace has no phases.

    Raises TraceError where nothing is left.
    """
    if trace.phase is None:
        return trace
    keep = trace.phase == phase
    if not keep.any():
        name, other = ("prefill", "decode") if phase == PREFILL else ("decode", "prefill")
        raise TraceError(f"the trace has {other} only, no {name}")
    if isinstance(trace, LoadTrace):
        return replace(trace, loads=trace.loads[keep], phase=trace.phase[keep])
    sequence = np.repeat(np.arange(trace.sequence_lengths.size), trace.sequence_lengths)
    lengths = np.bincount(sequence[keep])
    return replace(
        trace,
        topk_ids=trace.topk_ids[keep],
        sequence_lengths=lengths[lengths > 0],
        phase=trace.phase[keep],
    )


def in_order(traces: Sequence[Trace | LoadTrace], batch_tokens: int | None) -> Trace | LoadTrace:
    """One trace after the other, of each the whole batches, so that no batch mixes two of them.

    Metadata is the first one's; phases are left out, since ``of_phase`` comes before. Raises
    TraceError where they are not of one kind and model.
    """
    first = traces[0]
    if len(traces) == 1:
        return first
    shapes = {(type(trace), *_sizes(trace)) for trace in traces}
    if len(shapes) > 1 or len({stated_speeds(trace) for trace in traces}) > 1:
        raise TraceError(
            "traces of one replay must be of one kind and model: tokens or loads, layers, experts, "
            "experts per token, ranks and their speeds"
        )
    if isinstance(first, LoadTrace):
        loads = [trace.loads for trace in traces if isinstance(trace, LoadTrace)]
        return replace(first, loads=np.concatenate(loads), phase=None)
    whole = [_whole_batches(trace, batch_tokens) for trace in traces if isinstance(trace, Trace)]
    ids = np.concatenate([trace.topk_ids for trace in whole])
    experts = max(trace.num_experts for trace in whole)
    return Trace(ids, np.array([len(ids)]), experts, metadata=first.metadata)


def _sizes(trace: Trace | LoadTrace) -> tuple[int, ...]:
    if isinstance(trace, LoadTrace):
        return trace.loads.shape[1:]
    stated = trace.num_experts if "num_experts" in trace.metadata else 0
    return (*trace.topk_ids.shape[1:], stated)


def _whole_batches(trace: Trace, batch_tokens: int | None) -> Trace:
    kept = num_batches(trace, batch_tokens) * (batch_tokens or 0)
    return Trace(trace.topk_ids[:kept], np.array([kept]), trace.num_experts)


def stated_speeds(trace: Trace | LoadTrace) -> tuple[float, ...]:
    """Speeds of ranks, relative to each other, that the trace is meant for; () where it says none.

    Raises TraceError where what it says is no speeds.
    """
    stated = trace.metadata.get("speeds", [])
    if not isinstance(stated, list) or not all(map(_is_speed, stated)):
        raise TraceError(f"speeds = {stated!r} in the metadata must be numbers above 0, at most 1")
    return tuple(map(float, stated))


def _is_speed(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _checked_phase(phase: Integers | None, length: int) -> Integers | None:
    if phase is None:
        return None
    checked = integers("phase", phase, (1,), range(PREFILL, DECODE + 1))
    if len(checked) != length:
        raise TraceError(f"phase must be {length} values of {PREFILL} (prefill), {DECODE} (decode)")
    return checked


def num_batches(trace: Trace | LoadTrace, batch_tokens: int | None) -> int:
    """Whole batches in the trace; arguments and errors as ``batches``."""
    if isinstance(trace, LoadTrace):
        if batch_tokens is not None:
            raise TraceError("a trace of loads has its own batches; leave --batch-tokens out")
        return trace.num_batches
    if batch_tokens is None:
        raise TraceError(
            "a trace of tokens needs --batch-tokens, the tokens of one prefill batch over all "
            "ranks (8192, say)"
        )
    if batch_tokens < 1:
        raise TraceError(f"--batch-tokens = {batch_tokens} must be 1 or more")
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
    source ranks; a remainder at the end is left out. A trace of loads has its own batches: where
    its source ranks are not R, or not known, they are merged or split evenly.

    Raises TraceError: the trace is shorter than a batch, or too large for int32.
    """
    count = num_batches(trace, batch_tokens)
    for index in range(count):
        if isinstance(trace, LoadTrace):
            yield _as_loads(over_source_ranks(trace.loads[index], num_ranks))
        else:
            assert batch_tokens is not None
            chosen = trace.topk_ids[index * batch_tokens : (index + 1) * batch_tokens]
            yield count_loads(chosen, num_ranks, trace.num_experts)


def count_loads(topk_ids: Integers, num_ranks: int, num_experts: int) -> IntArray:
    """Ids (T, layers, K) -> loads int32 (layers, R, E), tokens split evenly over source ranks."""
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


def over_source_ranks(captured: Integers, num_ranks: int) -> NDArray[np.int64]:
    """Loads (layers, E) or (layers, Q, E) -> (layers, R, E), merged or split evenly."""
    loads = captured.astype(np.int64)
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
    # Remainders continue where those of the expert before stopped, so all parts get as many.
    start = rest.cumsum(-1) - rest
    turn = (np.arange(parts)[:, None] - start[:, :, None]) % parts
    pieces = split[:, :, None] + (turn < rest[:, :, None])
    return np.asarray(pieces.reshape(num_layers, num_ranks, num_experts))


def _as_loads(loads: Integers) -> IntArray:
    if loads.size and loads.sum((-2, -1)).max() not in LOADS:
        raise TraceError("a layer of one batch has more than 2**31 assignments; cut the trace")
    return loads.astype(np.int32)
