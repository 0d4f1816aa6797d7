"""simt.vectorized

Idea: move four values with every load, and let no two lanes of one pass meet in a bank.
Parent: simt.register
Changes: loads from global memory have 128 bits (64 where operands have 16). A is transposed on its
    way into shared memory, so that a thread's 8 rows are two 128-bit reads. Rows in shared memory
    are padded by 4 words, and a thread's 8 columns are two fragments of 4.
Why it pays: there are a quarter of the load instructions. The kernel reaches 0.863 of cuBLAS.

    Padding and splitting each remove one kind of bank conflict. Transposing A makes stores collide
    in pairs, which the padding prevents. Eight adjacent columns make reads of B collide in pairs,
    which the split prevents. Without padding (`pad=0`) the kernel reaches 0.839, without the split
    (`piece_n=8`) 0.762, and without both 0.740, the form that documents 002 and 000 start from.
Source: 002 float4 (31.42 TFLOP/s), 003 v05 (3.2 to 3.4 on a T4), 000 kernel 6.
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.kernels import simt_host
from outblas.kernels.shared import staged
from outblas.kernels.simt_config import SimtConfig

Config = registry.config_type(SimtConfig, "simt.vectorized")


KERNEL = Kernel(
    name="simt.vectorized",
    ladder="simt",
    idea="128-bit loads, A transposed in shared memory, bank conflicts removed",
    parent="simt.register",
    source="002 float4, 003 v05, 000 kernel 6",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"block_k": 8, "piece_n": 4, "vector": 4, "transpose_a": True, "pad": 4},
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, staged, Config)
