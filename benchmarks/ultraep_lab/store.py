"""Traces on disk, as ``.npz``.

Arrays, none of them pickled:
    topk_ids integer (tokens, layers, K), sequence_lengths integer (sequences,)  token level
    loads integer (batches, layers, R_source, E) or (batches, layers, E)         load level
    phase uint8 (tokens,) or (batches,)   optional: 0 prefill, 1 decode
    metadata                              optional: one string of JSON, an object
"""

import json
import os
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.errors import TraceError
from ultraep_lab.outputs import whole_file
from ultraep_lab.trace import LoadTrace, Metadata, Trace, count_experts
from ultraep_serve.system.files import open_regular, parse_object

MAX_BYTES = 4 << 30  # of arrays in one file: a million tokens of 94 layers, top-8, twice over
ARRAYS = ("topk_ids", "sequence_lengths", "loads", "phase", "metadata")


def load_trace(
    path: str | Path, *, num_experts: int | None = None, max_bytes: int = MAX_BYTES
) -> Trace | LoadTrace:
    """Read and check a trace.

    Args:
        path: of the ``.npz``.
        num_experts: E of a token-level trace; by default as its metadata states, else the highest
            id plus one.
        max_bytes: larger traces are refused before they are read.

    Raises:
        TraceError: says what is wrong with the file.
    """
    path = Path(path)
    arrays = _read_npz(path, max_bytes)
    try:
        return _from_arrays(arrays, num_experts)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def save_trace(path: str | Path, trace: Trace | LoadTrace) -> None:
    """Write ``.npz``. Raises TraceError and OutputError."""
    path = Path(path)
    if path.suffix != ".npz":
        raise TraceError(f"{path} must end in .npz")
    arrays: dict[str, NDArray[Any]]
    if isinstance(trace, Trace):
        ids, ends = trace.topk_ids, (int(trace.topk_ids.min(initial=0)), trace.num_experts - 1)
        narrow = ids.astype(np.result_type(*map(np.min_scalar_type, ends)), copy=False)
        arrays = {"topk_ids": narrow, "sequence_lengths": trace.sequence_lengths}
        metadata = {**trace.metadata, "num_experts": trace.num_experts}
    else:
        arrays, metadata = {"loads": trace.loads.astype(np.int32, copy=False)}, dict(trace.metadata)
    if trace.phase is not None:
        arrays["phase"] = trace.phase.astype(np.uint8)
    arrays["metadata"] = np.array(json.dumps(metadata, sort_keys=True))
    with whole_file(path) as part, part.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def _from_arrays(arrays: dict[str, NDArray[Any]], num_experts: int | None) -> Trace | LoadTrace:
    metadata = _metadata(arrays.get("metadata"))
    phase = arrays.get("phase")
    if "loads" in arrays:
        return LoadTrace(arrays["loads"], phase, metadata)
    if "topk_ids" not in arrays:
        raise TraceError("has neither topk_ids nor loads, so it is not a trace")
    topk_ids = arrays["topk_ids"]
    lengths = arrays.get("sequence_lengths", np.array([len(topk_ids)] if topk_ids.ndim else []))
    if num_experts is None:
        num_experts = metadata.get("num_experts")
    if num_experts is None:
        num_experts = count_experts(topk_ids)
    return Trace(topk_ids, lengths, num_experts, phase, metadata)


def _metadata(array: NDArray[Any] | None) -> Metadata:
    if array is None:
        return {}
    if array.dtype.kind != "U" or array.size != 1:
        raise TraceError(f"metadata is {array.dtype} {array.shape}, must be one string of JSON")
    return parse_object(str(array.reshape(())[()]), "metadata", TraceError)


def opened(path: Path) -> BinaryIO:
    """A regular file, also through a link. Raises OSError."""
    return os.fdopen(open_regular(path, links=True), "rb")


DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError,
    RuntimeError, SyntaxError, TypeError, ArithmeticError, MemoryError, tokenize.TokenError,
)  # fmt: skip  # all that zipfile and NumPy raise on damaged files


def _read_npz(path: Path, max_bytes: int) -> dict[str, NDArray[Any]]:
    """Those of ``ARRAYS`` that the file has; never unpickles.

    Raises:
        TraceError: no such file, damaged or truncated, arrays of objects, or together more than
            ``max_bytes``.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            arrays: dict[str, NDArray[Any]] = {}
            left = max_bytes
            for name in ARRAYS:
                if (info := members.get(f"{name}.npy")) is not None:
                    with archive.open(info) as stream:
                        arrays[name] = read_array(stream, info.filename, info.file_size, left)
                    left -= info.file_size
            return arrays
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except DAMAGED as error:
        raise TraceError(f"{path} cannot be read as .npz, or is truncated ({error})") from error


def read_array(
    stream: IO[bytes], name: str, num_bytes: int, max_bytes: int = MAX_BYTES
) -> NDArray[Any]:
    """The array in ``num_bytes`` of ``stream``, as NumPy saves one; never unpickles.

    Raises:
        TraceError: with ``name``, for more than ``max_bytes``, before anything is read, or more
            than an array; or one of ``DAMAGED``.
    """
    if num_bytes > max_bytes:
        raise TraceError(
            f"{name} has {num_bytes} bytes of the {max_bytes} allowed; cut the trace into smaller "
            "files"
        )
    npy: Any = np.lib.format  # its functions have no types
    array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
    if stream.read(1):  # which also compares the checksum at the end of a file's member
        raise TraceError(f"{name} has more than an array of {array.dtype} {array.shape}")
    return array
