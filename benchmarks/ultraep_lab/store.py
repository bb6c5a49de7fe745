"""Traces on disk: ``.npz`` for both kinds, Parquet for loads.

``.npz`` arrays, none of them pickled:
    topk_ids integer (tokens, layers, K), sequence_lengths integer (sequences,)  token level
    loads integer (batches, layers, R_source, E) or (batches, layers, E)         load level
    phase uint8 (tokens,) or (batches,)   optional: 0 prefill, 1 decode
    metadata                              optional: one string of JSON, an object

A Parquet table, which needs pyarrow, has one row per expert with assignments: ``batch``,
``layer``, ``source_rank`` (left out where unknown), ``expert``, ``assignments``, and ``phase``
where known. Shape and metadata are JSON under the key ``ultraep_trace`` of the file's own metadata.
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

from ultraep_lab.trace import LoadTrace, Metadata, Trace
from ultraep_serve.errors import TraceError
from ultraep_serve.system.files import open_regular, parse_object, whole_file

__all__ = ["DAMAGED", "MAX_BYTES", "load_trace", "opened", "read_array", "save_trace"]

MAX_BYTES = 4 << 30  # of arrays in one file: a million tokens of 94 layers, top-8, twice over
ARRAYS = ("topk_ids", "sequence_lengths", "loads", "phase", "metadata")


def load_trace(
    path: str | Path, *, num_experts: int | None = None, max_bytes: int = MAX_BYTES
) -> Trace | LoadTrace:
    """Read and check a trace.

    Args:
        path: ``.npz``, or ``.parquet`` of loads.
        num_experts: E of a token-level trace; by default as its metadata states, else the highest
            id plus one.
        max_bytes: larger traces are refused before they are read.

    Raises:
        TraceError: says what is wrong with the file.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return _read_parquet(path, max_bytes)
    arrays = _read_npz(path, max_bytes)
    try:
        return _from_arrays(arrays, num_experts)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def save_trace(path: str | Path, trace: Trace | LoadTrace) -> None:
    """Write ``.npz``, or Parquet for loads. Raises TraceError and OutputError."""
    path = Path(path)
    if path.suffix == ".parquet" and isinstance(trace, LoadTrace):
        _write_parquet(path, trace)
        return
    if path.suffix != ".npz":
        raise TraceError(f"{path} must end in .npz, or in .parquet for a trace of loads")
    arrays: dict[str, NDArray[Any]]
    if isinstance(trace, Trace):
        arrays = {"topk_ids": trace.topk_ids, "sequence_lengths": trace.sequence_lengths}
        metadata = {**trace.metadata, "num_experts": trace.num_experts}
    else:
        arrays, metadata = {"loads": trace.loads}, dict(trace.metadata)
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
        num_experts = _num_experts(topk_ids, metadata)
    return Trace(topk_ids, lengths, num_experts, phase, metadata)


def _metadata(array: NDArray[Any] | None) -> Metadata:
    if array is None:
        return {}
    if array.dtype.kind != "U" or array.size != 1:
        raise TraceError(f"metadata is {array.dtype} {array.shape}, must be one string of JSON")
    return parse_object(str(array.reshape(())[()]), "metadata", TraceError)


def _num_experts(topk_ids: NDArray[Any], metadata: Metadata) -> int:
    stated = metadata.get("num_experts")
    if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
        return stated
    if stated is not None:
        raise TraceError(f"num_experts = {stated!r} in the metadata must be a whole number above 0")
    if topk_ids.size and topk_ids.dtype.kind in "iu":
        return max(1, int(topk_ids.max()) + 1)
    return 1


def opened(path: Path) -> BinaryIO:
    """A regular file, also through a link. Raises OSError."""
    return os.fdopen(open_regular(path, links=True), "rb")


DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError,
    RuntimeError, SyntaxError, MemoryError, tokenize.TokenError,
)  # fmt: skip  # all that zipfile and NumPy raise on damaged files


def _read_npz(path: Path, max_bytes: int) -> dict[str, NDArray[Any]]:
    """Those of ``ARRAYS`` that the file has, read-only; never unpickles.

    Sizes are taken from the headers and refused before anything is allocated.

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
                    arrays[name] = _read_member(archive, info, left)
                    left -= arrays[name].nbytes
            return arrays
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except DAMAGED as error:
        raise TraceError(f"{path} cannot be read as .npz, or is truncated ({error})") from error


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> NDArray[Any]:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"{info.filename} is compressed in a way that NumPy does not write")
    with archive.open(info) as stream:
        array = read_array(stream, info.filename, info.file_size, max_bytes)
        stream.read(1)  # at the end of a member its checksum is compared
    return array


def read_array(
    stream: IO[bytes], name: str, num_bytes: int, max_bytes: int = MAX_BYTES
) -> NDArray[Any]:
    """The array in ``num_bytes`` of ``stream``, as NumPy saves one, read-only; never unpickles.

    Raises:
        TraceError: with ``name``, for an array of objects, of another size than it has, or of more
            than ``max_bytes``, before anything is allocated; or one of ``DAMAGED``.
    """
    shape, is_fortran, dtype = _read_header(stream)
    if dtype.hasobject:
        raise TraceError(f"{name} holds Python objects, must be numbers")
    needed = dtype.itemsize
    for size in shape:
        needed *= size
    if needed > max_bytes:
        raise TraceError(
            f"{name} would take {needed} bytes of the {max_bytes} allowed; "
            "cut the trace into smaller files"
        )
    if num_bytes != stream.tell() + needed:
        raise TraceError(f"{name} is {dtype} {shape}, which is not its size")
    data = stream.read(needed)
    if len(data) != needed:
        raise TraceError(f"{name} is truncated")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    npy: Any = np.lib.format  # its functions have no types
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise TraceError(f"array format {version} is not known; write version 1.0 or 2.0")
    shape, is_fortran, dtype = readers[version](stream)
    if any(type(size) is not int or size < 0 for size in shape):
        raise TraceError(f"an array has the impossible shape {shape}")
    return shape, is_fortran, dtype


PARQUET_KEY = b"ultraep_trace"
PARQUET_AXES = ("batch", "layer", "source_rank", "expert")
PARQUET_ROW_BYTES = 8 * (len(PARQUET_AXES) + 2)  # in memory while a table is read


def _write_parquet(path: Path, trace: LoadTrace) -> None:
    """Write the loads. Raises TraceError and OutputError."""
    arrow, parquet = _pyarrow()
    axes = PARQUET_AXES if trace.loads.ndim == 4 else (*PARQUET_AXES[:2], PARQUET_AXES[3])
    where = np.nonzero(trace.loads)
    columns: dict[str, NDArray[Any]] = {
        axis: index.astype(np.int32) for axis, index in zip(axes, where, strict=True)
    }
    columns["assignments"] = trace.loads[where].astype(np.int64)
    if trace.phase is not None:
        columns["phase"] = trace.phase[where[0]].astype(np.uint8)
    phases = None if trace.phase is None else trace.phase.tolist()
    about = {"shape": trace.loads.shape, "phase": phases, "metadata": dict(trace.metadata)}
    table = arrow.table(columns).replace_schema_metadata({PARQUET_KEY: json.dumps(about)})
    with whole_file(path) as part:
        parquet.write_table(table, part, compression="zstd")


def _read_parquet(path: Path, max_bytes: int) -> LoadTrace:
    """Read what ``_write_parquet`` wrote, or any table with its columns.

    Raises TraceError: damaged, too large, or columns are missing, negative or out of range.
    """
    arrow, parquet = _pyarrow()
    try:
        with opened(path) as stream, parquet.ParquetFile(stream) as file:
            if (rows := file.metadata.num_rows) * PARQUET_ROW_BYTES > max_bytes:
                raise TraceError(f"{path} has {rows} rows; cut it into smaller files")
            schema = file.schema_arrow
            numbers = [
                name
                for name in (*PARQUET_AXES, "assignments")
                if name in schema.names and arrow.types.is_integer(schema.field(name).type)
            ]
            table = file.read(columns=numbers)  # nothing else, however large it is
        columns = {name: table.column(name).to_numpy() for name in numbers}
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise TraceError(f"{path} cannot be read as Parquet ({error})") from error
    try:
        about = _about(schema.metadata or {})
        return _assemble(columns, about, max_bytes)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _assemble(columns: dict[str, NDArray[Any]], about: dict[str, Any], max_bytes: int) -> LoadTrace:
    axes = tuple(axis for axis in PARQUET_AXES if axis != "source_rank" or axis in columns)
    for name in (*axes, "assignments"):
        if name not in columns or not np.issubdtype(columns[name].dtype, np.integer):
            raise TraceError(f"column {name} must exist and hold integers only")
        values = columns[name]
        if values.size and not 0 <= values.min() <= values.max() < 1 << 31:
            raise TraceError(f"column {name} must be 0 to 2**31 - 1")
    shape = about.get("shape")
    if shape is None:
        shape = [int(columns[axis].max()) + 1 if columns[axis].size else 0 for axis in axes]
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or len(shape) != len(axes):
        raise TraceError(f"shape {shape} does not fit the columns {axes}")
    num_bytes = 8
    for size, axis in zip(shape, axes, strict=True):
        num_bytes *= size
        if columns[axis].size and columns[axis].max() >= size:
            raise TraceError(f"column {axis} has {columns[axis].max()}, must be below {size}")
    if num_bytes > max_bytes:
        raise TraceError(f"loads {shape} would take {num_bytes} bytes of the {max_bytes} allowed")
    loads = np.zeros(shape, np.int64)
    np.add.at(loads, tuple(columns[axis] for axis in axes), columns["assignments"])
    return LoadTrace(loads, _phase(about.get("phase")), about.get("metadata") or {})


def _phase(stored: Any) -> NDArray[np.integer] | None:
    if stored is None:
        return None
    if not isinstance(stored, list) or not all(value in (0, 1) for value in stored):
        raise TraceError("phase must be a list of 0 (prefill) and 1 (decode)")
    return np.array(stored, np.uint8)


def _about(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    text = metadata.get(PARQUET_KEY, b"{}").decode("utf-8", errors="replace")
    return parse_object(text, "metadata", TraceError)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(
            "Parquet needs pyarrow; run `pip install ultraep-serve[analysis]`, or use .npz"
        ) from error
    return pyarrow, pyarrow.parquet
