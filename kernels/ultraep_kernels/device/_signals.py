"""Flags in memory that several processors or processes share: post after writing, wait to read.

A flag holds the epoch it was last raised for and only grows, so it is never reset. ``post`` is a
release store at system scope by one thread, after a barrier of its program; ``wait`` polls without
order, and acquires once, before a barrier: what any thread of the poster wrote before is seen by
all threads of the waiter after. Neither is an atomic operation on other processors' memory, which
not every link offers.

These are Triton's own atomic loads and stores where it has them (from 3.9 on), which its sanitizer
of global memory understands, and inline assembly of the same meaning where it has not.

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

_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # no such fence is needed there, no clock
_HAS_LOADS = tl.constexpr(hasattr(tl, "atomic_load"))  # and stores
_NANOSECONDS_PER_LOOK = tl.constexpr(1000)  # in the interpreter
_LANES = tl.constexpr(256)  # at least as many as threads of a program that waits
_LOOKS = tl.constexpr(16)  # of a wait, of which the first also looks at clock and status


@triton.jit
def peek(pointer):
    """The word of this device at ``pointer``, for the whole program; nothing is ordered by it."""
    if _HAS_LOADS:
        word = tl.atomic_load(pointer, sem="relaxed", scope="gpu")
    else:
        word = tl.atomic_or(pointer, 0, sem="relaxed")
    return word


@triton.jit
def put(pointer, word, SCOPE: tl.constexpr = "gpu"):
    """Write what others ``peek`` at; with SCOPE "sys" what the host looks at."""
    if _HAS_LOADS:
        tl.atomic_store(pointer, word, sem="relaxed", scope=SCOPE)
    elif SCOPE == "sys":  # not every link to the host offers atomic operations
        tl.store(pointer, word)
    else:
        tl.atomic_xchg(pointer, word, sem="relaxed")


@triton.jit
def stop():
    """End all work of this process on the device for good: whoever waits for any gets an error.

    The host sees what this program wrote before. The interpreter, which cannot stop, goes on.
    """
    if not _IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def clock():
    """The device's clock, nanoseconds."""
    return tl.full((), 0, tl.int64) if _IS_INTERPRETED else globaltimer()


@triton.jit
def gives_up(since, looks, patience_ns, status_ptr):
    """Whether a wait ends after ``looks`` that found nothing: its time is over, or another's was.

    The clock differs from thread to thread, and barriers do not bear threads that leave a loop one
    by one, so the program goes by its latest. The interpreter has no clock: a look is a
    microsecond.
    """
    over = looks < 0
    if looks % _LOOKS == 1:
        waited = looks * _NANOSECONDS_PER_LOOK
        if not _IS_INTERPRETED:
            lanes = tl.arange(0, _LANES).to(tl.int64) * 0
            waited = tl.max(lanes + (globaltimer() - since), axis=0)
        over = (waited >= patience_ns) | ((peek(status_ptr) & TIMEOUTS) != 0)
    return over


@triton.jit
def post(flag_address, epoch):
    """Raise the flag after everything this program has written."""
    tl.debug_barrier()
    pointer = flag_address.to(tl.pointer_type(tl.int64))
    if _HAS_LOADS:
        tl.atomic_store(pointer, epoch, sem="release", scope="sys")
    elif _IS_INTERPRETED:
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
def read_flags(flag_addresses, mask, SEM: tl.constexpr):
    """Values of flags, 0 where masked; as many of them as the program has threads, or more.

    With SEM "acquire" what was written before is visible after a barrier and ``fence_aliases``;
    "relaxed" orders nothing. Threads see values of their own: only what is reduced over all of them
    is the same for all.
    """
    pointers = flag_addresses.to(tl.pointer_type(tl.int64))
    if _HAS_LOADS:
        found = tl.atomic_load(pointers, mask=mask, sem=SEM, scope="sys")
    elif _IS_INTERPRETED:
        found = tl.atomic_add(pointers, flag_addresses * 0, mask=mask, sem=SEM, scope="sys")
    else:
        found = tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.u32 wanted, $2, 0; mov.u64 $0, 0; "
            f"@wanted ld.{SEM}.sys.global.u64 $0, [$1]; }}",
            "=&l,l,r",
            [flag_addresses, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return tl.where(mask, found, 0)


@triton.jit
def _read_flag(flag_address, SEM: tl.constexpr):
    """Of one flag, by one thread, and the same for all."""
    if _HAS_LOADS:
        pointer = flag_address.to(tl.pointer_type(tl.int64))
        found = tl.atomic_load(pointer, sem=SEM, scope="sys")
    else:
        lanes = tl.arange(0, _LANES)
        addresses = flag_address + lanes.to(tl.int64) * 0
        found = tl.max(read_flags(addresses, lanes == 0, SEM), axis=0)
    return found


@triton.jit
def wait(flag_address, epoch, patience_ns, status_ptr, bit):
    """Whether the flag reached ``epoch`` in time; if not, sets ``bit`` of the status.

    Where a wait has already failed it is looked at twice and no more.
    """
    since = clock()
    looks = tl.full((), 0, tl.int32)
    over = looks < 0
    seen = _read_flag(flag_address, "relaxed")
    while (seen < epoch) & (over == 0):
        looks += 1
        over = gives_up(since, looks, patience_ns, status_ptr)
        seen = _read_flag(flag_address, "relaxed")
    if seen < epoch:
        tl.atomic_or(status_ptr, bit, sem="relaxed")
    else:
        _read_flag(flag_address, "acquire")
    tl.debug_barrier()
    fence_aliases()
    return seen >= epoch
