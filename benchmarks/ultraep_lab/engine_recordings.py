"""What engines write down of routing by themselves -> a trace; no part of this package serves.

vLLM (``--enable-return-routed-experts``) answers each request with the logical experts of its
tokens. SGLang (``--expert-distribution-recorder-mode``) dumps files: ``stat`` counts by forward
pass, ``per_token`` the physical experts of every token, rank by rank.
"""

import base64
import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.errors import TraceError
from ultraep_lab.integers import Integers, integer, integers
from ultraep_lab.store import DAMAGED, MAX_BYTES, opened, read_array
from ultraep_lab.trace import DECODE, IDS, LOADS, PREFILL, LoadTrace, Trace, count_experts
from ultraep_serve.system.files import read_text

BASIS = "recorded by the engine"
NO_ROUTING = "no routing is in it; start vLLM with --enable-return-routed-experts"
SGLANG_DECODE, SGLANG_IDLE = 2, 4  # values of its ForwardMode
_COUNTS, _MAP = "logical_count", "last_physical_to_logical_map"
_ARRAYS = {
    _COUNTS: ((3,), LOADS),  # (passes, layers, E)
    _MAP: ((2,), IDS[1:]),  # (layers, P)
}


def from_vllm(paths: Sequence[Path], num_experts: int | None = None) -> Trace:
    """The trace of responses of vLLM's completions or chat completions, one sequence each.

    A file has one response, a list of them, or one in each line. A sequence is the prompt's tokens,
    marked as prefill, and the generated ones but the last. Layers without a router are left out.

    Args:
        paths: files in order.
        num_experts: E; by default the highest expert chosen is the last one.

    Raises:
        ConfigError: a file cannot be read, or has more than 64 MiB.
        TraceError: a file is no response of one choice, or has no routing, or other experts.
    """
    parts: list[Integers] = []
    phases: list[NDArray[np.uint8]] = []
    for path in paths:
        for response in _responses(path):
            ids, prefill = _routing(response, path, num_experts)
            parts.append(ids)
            phases.append(np.where(np.arange(len(ids)) < prefill, PREFILL, DECODE).astype(np.uint8))
    lengths = np.array([len(ids) for ids in parts], np.int32)
    ids = _routed_layers(_joined(parts, "responses"), unrouted=0)
    return _trace(ids, lengths, np.concatenate(phases), "vllm", num_experts)


def from_sglang(paths: Sequence[Path], num_experts: int | None = None) -> Trace | LoadTrace:
    """The trace of files that SGLang's expert distribution recorder dumped.

    Files of mode ``stat`` are joined in order, a batch for each forward pass with tokens. Files of
    mode ``per_token`` belong to one recording, a file for each rank: of a pass, the tokens of the
    first rank come first, and ranks that saw the same tokens count once. Physical experts become
    logical ones by the map at the end of the recording.

    Args:
        paths: files in order.
        num_experts: E of a recording by token; by default the highest of the map is the last one.

    Raises:
        TraceError: a file is no such dump, or has no token.
    """
    dumps = [_dump(path) for path in paths]
    counted = [_COUNTS in dump for dump in dumps]
    if all(counted):
        counts = _joined([dump[_COUNTS] for dump in dumps], "counts")
        counts = counts[counts.any((1, 2))]
        if not len(counts):
            raise TraceError("SGLang's recorder counted no token; send requests meanwhile")
        kept = counts[:, counts.any((0, 2))]
        return LoadTrace(kept, None, _metadata("sglang", kept.shape[2], kept.shape[1]))
    if any(counted):
        raise TraceError("files of SGLang's modes stat and per_token cannot be joined")
    parts, lengths, phases = [], [], []
    for ids, phase in _passes(dumps):
        parts.append(ids)
        lengths.append(len(ids))
        phases.append(np.full(len(ids), phase, np.uint8))
    ids = _joined(parts, "passes")
    ids = _routed_layers(ids[:, :, (ids >= 0).any((0, 1))], unrouted=-1)
    stated = max(int(dump[_MAP].max()) + 1 for dump in dumps)
    lengths_array = np.array(lengths, np.int32)
    trace = _trace(ids, lengths_array, np.concatenate(phases), "sglang", num_experts or stated)
    return replace(trace, metadata={**trace.metadata, "batches": len(lengths)})


def _responses(path: Path) -> Iterator[Mapping[str, Any]]:
    text = read_text(path, "vLLM's responses")
    try:
        try:
            found = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read as JSON: {error}") from error
    yield from found if isinstance(found, list) else [found]


def _routing(response: Any, path: Path, num_experts: int | None) -> tuple[Integers, int]:
    """Ids (T, layers, K) of a response, and how many of the tokens are of the prompt."""
    try:
        (choice,) = response["choices"]
        generated = response["usage"]["completion_tokens"]
        encoded = choice["routed_experts"]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path} has something that is no whole response with one choice; ask for n = 1 and no "
            "stream, one prompt in each request"
        ) from error
    if encoded is None:
        raise TraceError(f"{path}: {NO_ROUTING}")
    try:
        saved = base64.b64decode(encoded, validate=True)
        array = read_array(io.BytesIO(saved), "routed_experts", len(saved))
    except (TraceError, *DAMAGED) as error:
        raise TraceError(f"{path}: routed_experts cannot be decoded: {error}") from error
    valid = IDS if num_experts is None else range(-1, num_experts)
    ids = integers(f"{path}: routed_experts", array, (3,), valid)  # (T, layers, K)
    generated = integer(f"{path}: completion_tokens", generated, range(len(ids) + 1))
    return ids, len(ids) - max(0, generated - 1)


def _dump(path: Path) -> Mapping[str, Any]:
    import torch  # takes seconds

    try:
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES >> 30} GiB")
            # Tensors and plain containers only, whatever the file says.
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *DAMAGED) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    wanted = ({_COUNTS}, {"records", _MAP})
    if not isinstance(found, dict) or not any(keys <= set(found) for keys in wanted):
        raise TraceError(
            f"{path} is no dump of SGLang's expert distribution recorder in mode stat or per_token"
        )
    for key in found.keys() & _ARRAYS.keys():
        found[key] = integers(f"{path}: {key}", found[key], *_ARRAYS[key])
    return found


def _passes(dumps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Integers, int]]:
    """Logical ids (T, layers, 8) of each forward pass, and its phase; -1 is padding."""
    passes: dict[int, dict[int, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    try:
        for dump in dumps:
            for record in dump["records"]:
                mode = integer("forward_mode", record["forward_mode"], LOADS)
                if mode != SGLANG_IDLE and record["input_ids"]:
                    by_rank = passes.setdefault(record["forward_pass_id"], {})
                    by_rank[record["rank"]] = record, dump
        for _, by_rank in sorted(passes.items()):
            ranks = [by_rank[rank] for rank in sorted(by_rank)]
            first = ranks[0][0]
            if all(record["input_ids"] == first["input_ids"] for record, _ in ranks):
                ranks = ranks[:1]
            ids = np.concatenate([_logical(record, dump) for record, dump in ranks])
            yield ids, DECODE if first["forward_mode"] == SGLANG_DECODE else PREFILL
    except TraceError:
        raise
    except (KeyError, TypeError, IndexError, RuntimeError, ValueError) as error:
        raise TraceError(f"SGLang's recording is not as expected: {error!r}") from error


def _logical(record: Mapping[str, Any], dump: Mapping[str, Any]) -> Integers:
    to_logical, key = dump[_MAP], "topk_ids_of_layer"
    physical = integers(key, record[key], (3,), range(-1, to_logical.shape[1]))  # (layers, T, 8)
    layer = np.arange(len(physical))[:, None, None]
    logical = np.where(physical >= 0, to_logical[layer, physical], -1)
    return logical.transpose(1, 0, 2)


def _joined(parts: Sequence[Integers], what: str) -> Integers:
    if not parts:
        raise TraceError(f"there are no {what} with tokens; send requests while it records")
    if len({part.shape[1:] for part in parts}) > 1:
        raise TraceError(f"the {what} are of different models")
    return np.concatenate(parts)


def _routed_layers(ids: Integers, unrouted: int) -> Integers:
    """Without the layers (dimension 1) that have ``unrouted`` everywhere: they have no router."""
    kept = ids[:, (ids != unrouted).any((0, 2))]
    if not kept.size:
        raise TraceError("no token was routed; send requests while it records")
    return kept


def _trace(
    ids: Integers,
    lengths: Integers,
    phase: NDArray[np.uint8],
    engine: str,
    num_experts: int | None,
) -> Trace:
    experts = count_experts(ids) if num_experts is None else num_experts
    return Trace(ids, lengths, experts, phase, _metadata(engine, experts, ids.shape[1]))


def _metadata(engine: str, num_experts: int, layers: int) -> dict[str, Any]:
    return {"basis": BASIS, "engine": engine, "num_experts": num_experts, "layers": layers}
