"""The reading of PTX and of what the assembler says."""

import pytest

from outblas.call.artifact import cta_threads
from outblas.inspect import machine_code

PTX = """
.version 8.8
.target sm_90a
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel(
    .param .u64 kernel_param_0
)
.reqntid 128, 2, 1
{
    .reg .pred %p<4>;
    mov.u32 %r1, %tid.x; // mov.u32 in a comment
    @%p1 bra $L__BB0_2;
    @!%p2 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
$L__BB0_2:
    { .reg .pred p; setp.ne.b32 p, %r3, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
    {%f1, %f2,
     %f3}, %rd3, %rd4, p, 1, 1, 0, 0; }
LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], %r2;
    ret;
}
"""


def test_ptx_instructions_are_counted_without_their_operands() -> None:
    assert machine_code.ptx_instructions(PTX) == {
        "mov.u32": 1,
        "bra": 1,
        "st.global.v4.b32": 1,
        "setp.ne.b32": 1,
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16": 1,
        "mbarrier.try_wait.parity.shared::cta.b64": 1,
        "ret": 1,
    }


def test_ptx_declares_the_threads_of_a_cta() -> None:
    assert cta_threads(PTX) == 128 * 2 * 1


def test_ptx_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ptx declares no \.reqntid"):
        cta_threads(".version 8.8")


def test_warnings_of_the_assembler_are_told_from_what_else_it_says() -> None:
    serialized = "Potential Performance Loss: wgmma.mma_async instructions are serialized in 'k'"
    log = f"""ptxas info    : (C7511) {serialized}
ptxas-blackwell info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored
ptxas /tmp/k.ptx, line 96; warning : Value of threads per SM is out of range
ptxas warning : Registers are spilled to local memory in function 'warning_info'
ptxas info    : Compiling entry function 'warning_of_k' for 'sm_90a'
ptxas info    : Used 58 registers, used 1 barriers
"""

    assert machine_code.warnings(log) == [
        f"(C7511) {serialized}",
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored",
        "Value of threads per SM is out of range",
        "Registers are spilled to local memory in function 'warning_info'",
    ]
