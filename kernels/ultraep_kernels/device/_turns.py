"""Programs of one launch that build on what others of it have done.

A program takes its turn when it starts, and waits only for programs whose turn came before: they
run already, so whatever order a device starts programs in, none waits for one that cannot start.
The last program to arrive may also do alone what comes next, and waits for nobody. Counters are
zero between launches: whoever finishes last makes them so.
"""

import triton
import triton.language as tl
from triton import knobs

from ultraep_kernels.device._signals import peek

_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def take_turn(counter_ptr):
    """The number of this program, counted from 0 in the order in which they start."""
    return tl.atomic_add(counter_ptr, 1, sem="relaxed")


@triton.jit
def arrive(counter_ptr):
    """How many programs arrived before this one, which sees all that they wrote."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def await_arrivals(counter_ptr, number):
    """Return when so many have arrived; all that they wrote is visible then."""
    arrived = peek(counter_ptr)
    while arrived < number:
        if not _IS_INTERPRETED:  # hundreds of programs may look at one word
            tl.inline_asm_elementwise(
                "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        arrived = peek(counter_ptr)
    tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
