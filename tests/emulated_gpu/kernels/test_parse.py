"""PTX is understood or refused, never guessed."""

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


def test_a_stack_that_nothing_uses_is_nothing() -> None:
    assert len(parse(module(".local .align 4 .b8 depot[8];\n\tret;")).code) == 1


def test_places_parameters_and_reunion() -> None:
    kernel = parse(
        module("""
	ld.param.b64 	%rd1, [one_param_0];
	ld.param.b32 	%r1, [one_param_1];
	setp.lt.s32 	%p1, %r1, -5;
	.loc	1 9 0, function_name $L__info_string0, inlined_at 1 11 5
	@!%p1 bra 	$L__BB0_2;
	add.s32 	%r1, %r1, 1;
$L__BB0_2:
	{ .reg .pred first; setp.eq.u32 first, %r1, 0; @first st.global.b32 [%rd1+4], %r1; }
	ret;
""")
    )
    branch, store = kernel.code[3], kernel.code[6]
    assert kernel.parameters == [("one_param_0", 0, 8), ("one_param_1", 8, 4)]
    assert (branch.goes_to, branch.meets, branch.is_negated) == (5, 5, True)
    assert kernel.lines[branch.line] == "one.py:9 (from one.py:11)"
    assert (store.operation, store.immediate, store.num_bytes) == ("store", 4, 4)
    assert kernel.constants == [(1 << 64) - 5, 1, 0]


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
