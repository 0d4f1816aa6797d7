"""Claims that arithmetic settles: tile sizes, budgets, limits of the machines.

Each is a number, a function that computes it from what the document itself states, and how closely
the two must agree.
"""

from ..claim import Claim
from . import doc_000, doc_001, doc_002, doc_003_cuda_cores, doc_003_tensor_cores, doc_004

CLAIMS: tuple[Claim, ...] = (
    *doc_000.CLAIMS,
    *doc_001.CLAIMS,
    *doc_002.CLAIMS,
    *doc_003_cuda_cores.CLAIMS,
    *doc_003_tensor_cores.CLAIMS,
    *doc_004.CLAIMS,
)
