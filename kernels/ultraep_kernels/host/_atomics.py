"""Flags and copies at raw addresses, for memory that several processes share.

The acquire/release pairs are what makes a flag mean "everything before it has arrived", on every
processor, not only where the hardware happens to order stores. Addresses are int64.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_INT64 = ir.IntType(64)


@intrinsic
def load_acquire(_context: Any, address: Any) -> Any:
    """int64 at ``address``; reads after it see what was written before the matching release."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(_context: Any, address: Any, value: Any) -> Any:
    """Write int64 ``value`` at ``address`` after everything written before it."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def copy_bytes(_context: Any, target_address: Any, source_address: Any, size: Any) -> Any:
    """Copy ``size`` bytes between regions that do not overlap."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        memcpy = builder.module.declare_intrinsic(
            "llvm.memcpy", [byte_pointer, byte_pointer, _INT64]
        )
        builder.call(
            memcpy,
            [
                builder.inttoptr(arguments[0], byte_pointer),
                builder.inttoptr(arguments[1], byte_pointer),
                arguments[2],
                ir.Constant(ir.IntType(1), 0),
            ],
        )
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
