"""Loads as a Parquet table that other tools can query; needs pyarrow.

One row per expert that had something to do: ``batch``, ``layer``, ``source_rank`` (left out where
unknown), ``expert``, ``assignments``, and ``phase`` where known. The shape and the metadata are
JSON under the key ``ultraep_trace`` of the file's own metadata.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import TraceError
from ultraep_serve.files import whole_file
from ultraep_serve.offline.trace import LoadTrace, parse_metadata

__all__ = ["read_parquet", "write_parquet"]

KEY = b"ultraep_trace"
AXES = ("batch", "layer", "source_rank", "expert")
ROW_BYTES = 8 * (len(AXES) + 2)  # in memory while a table is read


def write_parquet(path: Path, trace: LoadTrace) -> None:
    """Write the loads, whole or not at all. Raises TraceError."""
    arrow, parquet = _pyarrow()
    axes = AXES if trace.loads.ndim == 4 else (*AXES[:2], AXES[3])
    where = np.nonzero(trace.loads)
    columns: dict[str, NDArray[Any]] = {
        axis: index.astype(np.int32) for axis, index in zip(axes, where, strict=True)
    }
    columns["assignments"] = trace.loads[where].astype(np.int64)
    if trace.phase is not None:
        columns["phase"] = trace.phase[where[0]].astype(np.uint8)
    phases = None if trace.phase is None else trace.phase.tolist()
    about = {"shape": trace.loads.shape, "phase": phases, "metadata": dict(trace.metadata)}
    table = arrow.table(columns).replace_schema_metadata({KEY: json.dumps(about)})
    with whole_file(path) as part:
        parquet.write_table(table, part, compression="zstd")


def read_parquet(path: Path, max_bytes: int) -> LoadTrace:
    """Read what ``write_parquet`` wrote, or any table with its columns.

    Raises TraceError: damaged, too large, or columns are missing, negative or out of range.
    """
    arrow, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(path)
        if file.metadata.num_rows * ROW_BYTES > max_bytes:
            raise TraceError(f"{path} has {file.metadata.num_rows} rows; cut it into smaller files")
        schema = file.schema_arrow
        numbers = [
            name
            for name in (*AXES, "assignments")
            if name in schema.names and arrow.types.is_integer(schema.field(name).type)
        ]
        table = file.read(columns=numbers)  # nothing else, however large it is
        columns = {name: table.column(name).to_numpy() for name in numbers}
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except (arrow.ArrowException, OSError) as error:
        raise TraceError(f"{path} is no readable Parquet file ({error})") from error
    try:
        about = _about(schema.metadata or {})
        return _assemble(columns, about, max_bytes)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _assemble(columns: dict[str, NDArray[Any]], about: dict[str, Any], max_bytes: int) -> LoadTrace:
    axes = tuple(axis for axis in AXES if axis != "source_rank" or axis in columns)
    for name in (*axes, "assignments"):
        if name not in columns or not np.issubdtype(columns[name].dtype, np.integer):
            raise TraceError(f"column {name} must be there and hold integers without gaps")
        values = columns[name]
        if values.size and not 0 <= values.min() <= values.max() < 1 << 31:
            raise TraceError(f"column {name} must be 0 to 2**31 - 1")
    shape = about.get("shape")
    if shape is None:
        shape = [int(columns[axis].max()) + 1 if columns[axis].size else 0 for axis in axes]
    if len(shape) != len(axes) or not all(isinstance(size, int) and size >= 0 for size in shape):
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


def _phase(told: Any) -> NDArray[np.integer] | None:
    if told is None:
        return None
    if not isinstance(told, list) or not all(value in (0, 1) for value in told):
        raise TraceError("phase must be a list of 0 (prefill) and 1 (decode)")
    return np.array(told, np.uint8)


def _about(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    text = metadata.get(KEY, b"{}").decode("utf-8", errors="replace")
    return dict(parse_metadata(text))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(
            "Parquet needs pyarrow; run `pip install ultraep-serve[analysis]`, or use .npz"
        ) from error
    return pyarrow, pyarrow.parquet
