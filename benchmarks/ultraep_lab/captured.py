"""What ranks captured -> a trace: the spools of all ranks, joined batch by batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.trace import DECODE, PREFILL, LoadTrace, Trace
from ultraep_serve.errors import TraceError
from ultraep_serve.telemetry.control import RecordLevel
from ultraep_serve.telemetry.spool import (
    CHUNK,
    CHUNK_MAGIC,
    PAGE_BYTES,
    SpoolHeader,
    parse_spool_header,
)

__all__ = ["BASIS", "assemble"]

BASIS = "recorded while serving"
NOTHING = "no whole batch was recorded; send requests meanwhile, or raise --max-mib"
DAMAGED = "a recording is damaged; record again"
Layers = dict[int, NDArray[Any]]  # by layer: what one rank captured of one batch


@dataclass
class _Batch:
    """One rank's part of a batch."""

    batch_tokens: int  # over all ranks, padding included
    is_decode: bool
    layers: Layers


def assemble(spools: Sequence[bytes], limit: int | None = None) -> Trace | LoadTrace:
    """The trace of the first ``limit`` batches that every rank has captured in full.

    Batches and rows without tokens of requests are left out. Of a batch, the tokens of rank 0 come
    first. ``sequence_lengths`` of a token-level trace are the tokens of each batch: where prompts
    begin is not known.

    Args:
        spools: the files of all ranks that captured, in any order.
        limit: batches at most; None is all.

    Raises:
        SpoolError: a file is not of this version.
        TraceError: files are damaged, missing or of different captures, or hold no whole batch.
    """
    headers = [parse_spool_header(spool) for spool in spools]
    order = _checked_order(headers)
    header = headers[order[0]]
    ranks = [_whole_batches(spools[index], headers[index]) for index in order]
    has_tokens = header.level is RecordLevel.TOKENS
    joined: list[NDArray[Any]] = []
    phases: list[int] = []
    for number in sorted(set.intersection(*(set(batches) for batches in ranks))):
        batch = [batches[number] for batches in ranks]
        array = _tokens(header, batch) if has_tokens else _loads(header, batch)
        if len(array) if has_tokens else array.any():
            joined.append(array)
            phases.append(DECODE if batch[0].is_decode else PREFILL)
        if len(joined) == limit:
            break
    if not joined:
        raise TraceError(NOTHING)
    _require_one_shape(joined)
    metadata = _metadata(header, len(joined), max(header.lost_batches for header in headers))
    phase = np.array(phases, np.uint8)
    if not has_tokens:
        return LoadTrace(np.stack(joined), phase, metadata)
    lengths = np.array([len(tokens) for tokens in joined], np.int32)
    num_experts = header.source.num_experts
    return Trace(np.concatenate(joined), lengths, num_experts, np.repeat(phase, lengths), metadata)


def _checked_order(headers: Sequence[SpoolHeader]) -> list[int]:
    """Positions of the headers by rank."""
    if not headers:
        raise TraceError(
            "no rank has recorded anything: there were no requests meanwhile, this is not the "
            "first host's sidecar, or micro-batches overlap (--enable-dbo; not supported)"
        )
    first = headers[0]
    for header in headers:
        if (header.number, header.level) != (first.number, first.level) or (
            _model(header) != _model(first)
        ):
            raise TraceError(
                "the ranks' recordings do not belong together: another recording was started "
                "meanwhile; record again"
            )
    order = sorted(range(len(headers)), key=lambda index: headers[index].source.rank)
    found = [headers[index].source.rank for index in order]
    expected = [0] if first.source.is_shared else list(range(first.source.num_ranks))
    if found != expected:
        raise TraceError(f"recordings of ranks {found}, expected {expected}; record again")
    return order


def _model(header: SpoolHeader) -> tuple[object, ...]:
    source = header.source
    return (source.num_ranks, source.num_layers, source.num_experts, source.is_shared)


def _whole_batches(spool: bytes, header: SpoolHeader) -> dict[int, _Batch]:
    """Batches of one rank, by number, that have every layer with the same rows."""
    batches: dict[int, _Batch] = {}
    for layer, number, batch_tokens, is_decode, rows in _chunks(spool, header):
        batch = batches.setdefault(number, _Batch(batch_tokens, is_decode, {}))
        batch.layers[layer] = rows
    wanted = set(range(header.source.num_layers))
    return {
        number: batch
        for number, batch in batches.items()
        if set(batch.layers) == wanted and len({rows.shape for rows in batch.layers.values()}) == 1
    }


def _chunks(
    spool: bytes, header: SpoolHeader
) -> Iterator[tuple[int, int, int, bool, NDArray[Any]]]:
    """Layer, batch, batch tokens, whether decode, and the array of every chunk that is complete."""
    dtype, position = header.dtype, PAGE_BYTES
    while position + CHUNK.size <= len(spool):
        magic, layer, number, tokens, rows, columns, is_decode = CHUNK.unpack_from(spool, position)
        if magic != CHUNK_MAGIC or layer >= header.source.num_layers:
            raise TraceError(DAMAGED)
        position += CHUNK.size
        size = rows * columns
        if position + size * dtype.itemsize > len(spool):
            return  # its last chunk was still being written
        array = np.frombuffer(spool, dtype, size, position).reshape(rows, columns)
        yield layer, number, tokens, bool(is_decode), array
        position += size * dtype.itemsize


def _tokens(header: SpoolHeader, batch: Sequence[_Batch]) -> NDArray[Any]:
    """Experts (T, layers, K) of the tokens of all ranks, without rows of padding alone."""
    stacked = [np.stack([part.layers[i] for i in sorted(part.layers)], 1) for part in batch]
    stacked = [tokens for tokens in stacked if tokens.size]
    _require_one_shape(stacked)
    tokens = np.concatenate(stacked) if stacked else np.empty((0, 1, 1), header.dtype)
    tokens = tokens[(tokens != -1).any((1, 2))]
    return _compact(tokens, header.source.num_experts) if len(tokens) else tokens


def _loads(header: SpoolHeader, batch: Sequence[_Batch]) -> NDArray[np.int32]:
    """Loads (layers, R, E), or (layers, E) where all ranks see the same tokens."""
    by_rank = [np.concatenate([part.layers[i] for i in sorted(part.layers)]) for part in batch]
    if any(part.shape != (header.source.num_layers, header.source.num_experts) for part in by_rank):
        raise TraceError(DAMAGED)
    load = by_rank[0] if header.source.is_shared else np.stack(by_rank, 1)
    return load.astype(np.int32)


def _require_one_shape(parts: Sequence[NDArray[Any]]) -> None:
    if len({part.shape[1:] for part in parts}) > 1:
        raise TraceError("there are different numbers of experts per token; record again")


def _compact(topk_ids: NDArray[Any], num_experts: int) -> NDArray[Any]:
    """The smallest type that holds all ids; E, which is no expert, becomes padding."""
    if topk_ids.min() < -1 or topk_ids.max() > num_experts:
        raise TraceError(DAMAGED)
    if topk_ids.min() >= 0 and topk_ids.max() < num_experts:
        return topk_ids.astype(np.uint8 if num_experts <= 256 else np.uint16)
    return np.where(topk_ids == num_experts, -1, topk_ids).astype(np.int16)


def _metadata(header: SpoolHeader, batches: int, lost: int) -> dict[str, Any]:
    source = header.source
    return {
        "source": "ultraep-serve record",
        "basis": BASIS,
        "engine": source.engine,
        "mode": "tensor" if source.is_shared else "data",
        "ranks": source.num_ranks,
        "num_experts": source.num_experts,
        "layers": source.num_layers,
        "min_batch_tokens": source.min_batch_tokens,
        "batches": batches,
        "lost_batches": lost,
    }
