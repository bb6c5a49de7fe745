"""PTX that the machine does not know is refused, never guessed."""

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

from tests.emulated_gpu.kernels.parse import PtxError, parse

pytestmark = pytest.mark.interpreter


def module(body: str) -> str:
    return f"""
.file	1 "/somewhere/kernels" "one.py"
.visible .entry one(
	.param .u64 .ptr .global .align 1 one_param_0,
	.param .u32 one_param_1
)
.reqntid 32
{{
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<4>;
	.loc	1 7 0
{body}
}}
"""


@pytest.mark.parametrize(
    "statement",
    [
        "add.f32 %r1, %r2, %r3;",  # no floating point
        "add.rn.s32 %r1, %r2, %r3;",
        "ld.global.L1::no_allocate.b32 %r1, [%rd1];",
        "ld.acquire.global.b32 %r1, [%rd1];",  # an order needs a scope
        "ld.b32 %r1, [%rd1];",  # which memory
        "bar.sync 1, 64;",
        "bar.arrive 0, 64;",
        "fence.proxy.async;",
        "mov.u32 %r1, %smid;",
        "atom.global.gpu.inc.u32 %r1, [%rd1], %r2;",
        "shfl.sync.bfly.b64 %rd1, %rd1, 1, 31, -1;",
        "call.uni helper, ();",
        ".local .align 4 .b8 depot[8]; mov.b64 %rd1, depot;",
        "ld.local.b32 %r1, [%rd1];",
    ],
)
def test_what_is_not_known_is_an_error(statement: str) -> None:
    with pytest.raises(PtxError):
        parse(module(f"{statement}\n\tret;"))
