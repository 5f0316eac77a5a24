"""Where there is no GPU, Triton's kernels run in its interpreter. It decides when Triton is first imported.

With NumPy 2.4 or newer the interpreter needs Triton 3.7 (triton-lang/triton#9171).
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
