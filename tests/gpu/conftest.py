"""These tests run where there are GPUs; elsewhere they are not collected."""

import torch

collect_ignore = (
    []
    if torch.cuda.is_available()
    else ["test_gpus.py", "test_masks.py", "test_nodes.py", "test_offload.py", "test_transports.py"]
)
