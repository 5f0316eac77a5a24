"""Build BMTrain's source package, unmodified, for this Python, CUDA and these GPUs.

BMTrain 1.0.1 on PyPI has wheels for Python up to 3.11 with machine code for GPUs up to sm_80. Its source package names
its architectures in CMakeLists.txt, among them some that CUDA 13 has dropped, and looks for NCCL in a way that NCCL's
newer packages have broken. `nvcc` is a wrapper around the compiler; `build` finds the tools, says where NCCL is, and
builds.
"""

from bmburst.runtime.build_bmtrain.build import BuildSpec, build_wheel, check_toolchain

__all__ = ["BuildSpec", "build_wheel", "check_toolchain"]
