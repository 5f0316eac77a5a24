"""GPU memory that calls of attention keep for the next."""

import torch

from bmburst.attention.recording import forget
from bmburst.comm.transports import release_boxes


def empty_cache() -> None:
    """Give back the GPU memory that calls of `burst_attention` keep for the next, and what torch's cache holds.

    Attention keeps the boxes of transport "peer", outside of torch's cache and as large as the largest call so far
    needed them, and what CUDA graphs of its kernels read and write. Call this between phases of a program where one has
    longer sequences or more ranks a group than the next, before the groups of the last are destroyed: boxes of a group
    that is gone stay until the process ends. Later calls take new memory.

    Every rank must call it, at the same point of the program. It waits for the GPU.
    """
    release_boxes()
    forget()
    torch.cuda.empty_cache()
