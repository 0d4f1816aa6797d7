"""Builds `outblas_native` for the torch that is installed: torch's C++ interface differs from one
version to the next.
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension(
            "outblas_native",
            ["src/module.cpp"],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    install_requires=[f"torch=={torch.__version__.partition('+')[0]}"],
)
