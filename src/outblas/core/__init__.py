"""What describes a GEMM: its operands, epilogue, scales and groups. It imports `base` alone."""
