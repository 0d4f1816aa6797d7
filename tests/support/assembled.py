"""What PTX and the assembler's log say of a compiled kernel: a look at the machine code that starts
no disassembler, which takes 0.2 s of a core each time.
"""

from collections.abc import Sequence

from outblas.core.artifact import Artifact
from outblas.inspect import machine_code

NOTHING_SPILT = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def require(artifact: Artifact, *, has: Sequence[str] = (), lacks: Sequence[str] = ()) -> None:
    """No spills, no warning of the assembler, PTX instructions that begin with each of `has` and
    none that begins with one of `lacks`.
    """
    case = f"{artifact.kernel} for {artifact.arch} ({artifact.config}, {artifact.layout})"
    opcodes = machine_code.ptx_instructions(artifact.ptx)

    assert NOTHING_SPILT in artifact.log, f"{case}: {artifact.log}"
    assert machine_code.warnings(artifact.log) == [], case
    for prefix in has:
        assert any(opcode.startswith(prefix) for opcode in opcodes), f"{case} has no {prefix}"
    for prefix in lacks:
        assert not any(opcode.startswith(prefix) for opcode in opcodes), f"{case} has {prefix}"
