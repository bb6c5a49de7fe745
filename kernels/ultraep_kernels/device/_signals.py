"""Flags in memory that several processors or processes share: post after writing, wait to read.

A flag holds the epoch it was last raised for and only grows, so it is never reset. ``post`` is a
release at system scope by one thread, after a barrier of its program; ``wait`` is an acquire before
one: what any thread of the poster wrote before is seen by all threads of the waiter after.

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
    tl.atomic_xchg(flag_address.to(tl.pointer_type(tl.int64)), epoch, sem="release", scope="sys")


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
    """Values of flags; what was written before is visible after a barrier and ``fence_aliases``."""
    pointers = flag_addresses.to(tl.pointer_type(tl.int64))
    zeros = flag_addresses * 0
    return tl.atomic_add(pointers, zeros, mask=mask, sem="acquire", scope="sys")


@triton.jit
def wait(flag_address, epoch, patience_ns, status_ptr, bit):
    """Whether the flag reached ``epoch`` in time; if not, sets ``bit`` of the status.

    Where a wait has already failed it is looked at once.
    """
    pointer = flag_address.to(tl.pointer_type(tl.int64))
    zero = epoch * 0
    since = clock()
    looks = zero
    status = tl.atomic_or(status_ptr, 0, sem="relaxed")
    seen = tl.atomic_add(pointer, zero, sem="acquire", scope="sys")
    while (seen < epoch) & ((status & TIMEOUTS) == 0):
        looks += 1
        status = verdict(since, looks, patience_ns, status_ptr, bit)
        seen = tl.atomic_add(pointer, zero, sem="acquire", scope="sys")
    if seen < epoch:
        tl.atomic_or(status_ptr, bit)
    tl.debug_barrier()
    fence_aliases()
    return seen >= epoch
