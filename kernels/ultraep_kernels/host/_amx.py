"""Tiles of AMX, and vectors of AVX512, which every CPU with AMX has. Addresses are int64.

A tile has 16 rows of 64 bytes, and lies in memory as one KB. Four hold the sums of 32 rows and 32
columns in float32, two what their rows give and two what their columns give, in bfloat16.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = [
    "COLUMNS",
    "ROWS",
    "add_few_products",
    "add_products",
    "begin",
    "copy_line",
    "end",
    "fetch_line",
    "settings",
    "silu",
    "start",
    "store",
    "weigh",
]

ROWS, COLUMNS = 16, 16  # of float32 in a tile; of bfloat16 it has twice as many columns
_SUMS, _ROWS, _COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)  # numbers of tiles
_LINE = 64  # bytes, also of a tile's row

_BYTE, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), COLUMNS), ir.VectorType(_INT32, COLUMNS)
_FUSED = ("contract",)

# exp(r) = 1 + r + r**2 * p(r) where |r| <= log(2) / 2, within 2**-23: Cephes' expf, by S. Moshier.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOG2_E, _LOG_2, _REST_OF_LOG_2 = 1.4426950408889634, 0.693359375, -2.12194440e-4
# Whose exponentials float32 has. So a gate below -88 counts for 6e-39 of it, not for less.
_LEAST, _MOST = -87.0, 88.0


class _BFloat16(ir.types.Type):  # type: ignore[misc]
    """A number type that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_ROUNDED = ir.VectorType(_BFloat16(), COLUMNS)


def settings() -> NDArray[np.uint8]:
    """What ``begin`` is told, (64,): all eight tiles have all of their rows."""
    told = np.zeros(64, np.uint8)
    told[0] = 1
    told[16:32].view(np.uint16)[:] = _LINE
    told[48:56] = ROWS
    return told


def _operation(generate: Callable[[Any, Any], None], *arguments: Any) -> Any:
    """What numba puts in place of a call with ``arguments``, of which nothing comes back."""

    def code(target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        generate(builder, values)
        return target.get_dummy_value()

    return types.void(*arguments), code


def _call(builder: Any, name: str, arguments: Sequence[Any], result: Any = None) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        kinds = [argument.type for argument in arguments]
        function = ir.Function(
            builder.module, ir.FunctionType(result or ir.VoidType(), kinds), name
        )
    return builder.call(function, arguments)


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _at(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_INT64, offset)), kind.as_pointer())


@intrinsic
def begin(_context: Any, address: Any) -> Any:
    """Use tiles, in this thread, with ``settings`` at ``address``."""
    return _operation(
        lambda builder, values: _call(
            builder, "llvm.x86.ldtilecfg", [_at(builder, values[0], _BYTE)]
        ),
        types.int64,
    )


@intrinsic
def end(_context: Any) -> Any:
    """Use tiles no more."""
    return _operation(lambda builder, _: _call(builder, "llvm.x86.tilerelease", []))


@intrinsic
def start(_context: Any) -> Any:
    """Make the sums zero."""

    def generate(builder: Any, _: Any) -> None:
        for number in _SUMS:
            _call(builder, "llvm.x86.tilezero", [_tile(number)])

    return _operation(generate)


def _add_products(*arguments: Any) -> Any:
    def generate(builder: Any, values: Any) -> None:
        def load(number: int, address: Any) -> None:
            told = [_tile(number), _at(builder, address, _BYTE), ir.Constant(_INT64, _LINE)]
            _call(builder, "llvm.x86.tileloadd64", told)

        def add(row: int, column: int) -> None:
            numbers = _SUMS[2 * row + column], _ROWS[row], _COLUMNS[column]
            _call(builder, "llvm.x86.tdpbf16ps", [_tile(number) for number in numbers])

        *rows, first, second = values
        load(_COLUMNS[0], first)
        load(_ROWS[0], rows[0])
        add(0, 0)
        load(_COLUMNS[1], second)
        add(0, 1)
        if len(rows) > 1:
            load(_ROWS[1], rows[1])
            add(1, 0)
            add(1, 1)

    return _operation(generate, *arguments)


@intrinsic
def add_products(_context: Any, rows: Any, more_rows: Any, columns: Any, more_columns: Any) -> Any:
    """Add to the sums 32 products of each of their rows and columns, from tiles of both."""
    return _add_products(*[types.int64] * 4)


@intrinsic
def add_few_products(_context: Any, rows: Any, columns: Any, more_columns: Any) -> Any:
    """Add to the sums of the first 16 rows only."""
    return _add_products(*[types.int64] * 3)


@intrinsic
def store(_context: Any, address: Any) -> Any:
    """Write the sums (32, 32) at ``address``."""

    def generate(builder: Any, values: Any) -> None:
        width = 2 * _LINE
        for number, place in zip(
            _SUMS, (0, _LINE, ROWS * width, ROWS * width + _LINE), strict=True
        ):
            told = [_tile(number), _at(builder, values[0], _BYTE, place)]
            _call(builder, "llvm.x86.tilestored64", [*told, ir.Constant(_INT64, width)])

    return _operation(generate, types.int64)


@intrinsic
def silu(_context: Any, address: Any, target: Any) -> Any:
    """From gates (16,) and ups (16,) float32 at ``address``, silu(gate) * up in bfloat16."""

    def generate(builder: Any, values: Any) -> None:
        gate, up = (_load(builder, values[0], offset) for offset in (0, _LINE))
        exponential = _exp(builder, builder.fsub(_floats(0), gate))
        activated = builder.fdiv(gate, builder.fadd(exponential, _floats(1)))
        _store_rounded(builder, builder.fmul(activated, up), values[1], 0)

    return _operation(generate, types.int64, types.int64)


@intrinsic
def weigh(_context: Any, address: Any, weight: Any, target: Any) -> Any:
    """From float32 (32,) at ``address``, the same times ``weight`` in bfloat16."""

    def generate(builder: Any, values: Any) -> None:
        undefined, first = ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INT32, 0)
        once = builder.insert_element(undefined, values[1], first)
        weights = builder.shuffle_vector(once, undefined, _ints(0))
        for number in range(2):
            weighted = builder.fmul(_load(builder, values[0], number * _LINE), weights)
            _store_rounded(builder, weighted, values[2], number * _LINE // 2)

    return _operation(generate, types.int64, types.float32, types.int64)


@intrinsic
def copy_line(_context: Any, address: Any, target: Any) -> Any:
    """Copy 64 bytes."""

    def generate(builder: Any, values: Any) -> None:
        line = _load(builder, values[0], 0)
        builder.store(line, _at(builder, values[1], _FLOATS), align=1)

    return _operation(generate, types.int64, types.int64)


@intrinsic
def fetch_line(_context: Any, address: Any) -> Any:
    """Have 64 bytes brought nearer, wherever ``address`` points."""

    def generate(builder: Any, values: Any) -> None:
        told = [ir.Constant(_INT32, number) for number in (0, 2, 1)]  # to read, into L2, data
        _call(builder, "llvm.prefetch.p0", [_at(builder, values[0], _BYTE), *told])

    return _operation(generate, types.int64)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [ir.Constant(ir.FloatType(), float(np.float32(value)))] * COLUMNS)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [ir.Constant(_INT32, value)] * COLUMNS)


def _load(builder: Any, address: Any, offset: int) -> Any:
    return builder.load(_at(builder, address, _FLOATS, offset), align=1)


def _store_rounded(builder: Any, value: Any, address: Any, offset: int) -> None:
    rounded = builder.fptrunc(value, _ROUNDED)
    builder.store(rounded, _at(builder, address, _ROUNDED, offset), align=1)


def _exp(builder: Any, x: Any) -> Any:
    def fused(first: Any, second: Any, third: Any) -> Any:
        return builder.fadd(builder.fmul(first, second, flags=_FUSED), third, flags=_FUSED)

    for name, bound in (("maxnum", _LEAST), ("minnum", _MOST)):
        x = _call(builder, f"llvm.{name}.v{COLUMNS}f32", [x, _floats(bound)], _FLOATS)
    scaled = builder.fmul(x, _floats(_LOG2_E))
    whole = _call(builder, f"llvm.rint.v{COLUMNS}f32", [scaled], _FLOATS)
    rest = fused(whole, _floats(-_LOG_2), x)
    rest = fused(whole, _floats(-_REST_OF_LOG_2), rest)
    power = _floats(_EXP[0])
    for factor in _EXP[1:]:
        power = fused(power, rest, _floats(factor))
    power = fused(builder.fmul(power, rest), rest, builder.fadd(rest, _floats(1)))
    exponent = builder.shl(builder.add(builder.fptosi(whole, _INTS), _ints(127)), _ints(23))
    return builder.fmul(power, builder.bitcast(exponent, _FLOATS))
