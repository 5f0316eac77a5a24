"""What all tests of a process share.

Where there is no GPU, Triton's kernels run in its interpreter. It decides when Triton is first imported. With NumPy 2.4
or newer the interpreter needs Triton 3.7 (triton-lang/triton#9171).

Torch computes in one thread, as in ranks that are processes: ranks that are threads would get as many more each, which
wait for each other on processors that are taken.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
