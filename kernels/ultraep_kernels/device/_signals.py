"""Flags in memory that several processors or processes share: post after writing, wait to read.

A flag holds the epoch it was last raised for and only grows, so it is never reset. ``post`` is a
release store at system scope by one thread, after a barrier of its program; ``wait`` is an acquire
load before one: what any thread of the poster wrote before is seen by all threads of the waiter
after. Neither is an atomic operation on other processors' memory, which not every link offers.

Every rank, and every layer, has the same memory mapped at an address of its own. Accesses through
two addresses are ordered only where a proxy fence for aliases lies between them (PTX ISA, memory
consistency model, proxies), so whoever has waited runs ``fence_aliases`` before anything is read.

Memory of other processes must be passed as addresses in a tensor, never as a tensor: Triton's
interpreter copies tensors back after a launch, over what other processes have written meanwhile.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import globaltimer

from ultraep_kernels.device.status import TIMEOUTS

__all__ = ["clock", "fence_aliases", "post", "read_flags", "verdict", "wait"]

_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # no such fence is needed there, no clock
_NANOSECONDS_PER_LOOK = tl.constexpr(1000)  # in the interpreter
_LANES = tl.constexpr(256)  # at least as many as threads of a program that waits


@triton.jit
def clock():
    """The device's clock, nanoseconds."""
    return tl.full((), 0, tl.int64) if _IS_INTERPRETED else globaltimer()


@triton.jit
def verdict(since, looks, patience_ns, status_ptr, bit):
    """Status word after an unsuccessful poll: ``bit`` is set in it once ``patience_ns`` are over.

    The clock differs from thread to thread, and barriers do not bear threads that leave a loop one
    by one; what an atomic operation of the whole program returns is the same for all of them. The
    interpreter, which has no clock, takes a look for a microsecond.
    """
    waited = looks * _NANOSECONDS_PER_LOOK if _IS_INTERPRETED else globaltimer() - since
    return tl.atomic_or(status_ptr, tl.where(waited >= patience_ns, bit, 0), sem="relaxed")


@triton.jit
def post(flag_address, epoch):
    """Raise the flag after everything this program has written."""
    tl.debug_barrier()
    if _IS_INTERPRETED:
        pointer = flag_address.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(pointer, epoch, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; "
            "setp.eq.u32 first, thread, 0; @first st.release.sys.global.u64 [$1], $2; "
            "mov.u32 $0, 0; }",
            "=r,l,l",
            [flag_address, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fence_aliases():
    """Order what was written through other addresses before what is read through own ones after.

    Every thread runs it, after the barrier that follows the wait.
    """
    if not _IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def read_flags(flag_addresses, mask):
    """Values of flags, 0 where masked; as many of them as the program has threads, or more.

    What was written before is visible after a barrier and ``fence_aliases``. Threads see values of
    their own: only what is reduced over all of them is the same for all.
    """
    if _IS_INTERPRETED:
        pointers = flag_addresses.to(tl.pointer_type(tl.int64))
        found = tl.atomic_add(pointers, flag_addresses * 0, mask=mask, sem="acquire", scope="sys")
    else:
        found = tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.u32 wanted, $2, 0; mov.u64 $0, 0; "
            "@wanted ld.acquire.sys.global.u64 $0, [$1]; }",
            "=&l,l,r",
            [flag_addresses, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return tl.where(mask, found, 0)


@triton.jit
def _read_flag(flag_address):
    """Of one flag, by one thread, and the same for all."""
    lanes = tl.arange(0, _LANES)
    return tl.max(read_flags(flag_address + lanes.to(tl.int64) * 0, lanes == 0), axis=0)


@triton.jit
def wait(flag_address, epoch, patience_ns, status_ptr, bit):
    """Whether the flag reached ``epoch`` in time; if not, sets ``bit`` of the status.

    Where a wait has already failed it is looked at once.
    """
    since = clock()
    looks = epoch * 0
    status = tl.atomic_or(status_ptr, 0, sem="relaxed")
    seen = _read_flag(flag_address)
    while (seen < epoch) & ((status & TIMEOUTS) == 0):
        looks += 1
        status = verdict(since, looks, patience_ns, status_ptr, bit)
        seen = _read_flag(flag_address)
    if seen < epoch:
        tl.atomic_or(status_ptr, bit)
    tl.debug_barrier()
    fence_aliases()
    return seen >= epoch
