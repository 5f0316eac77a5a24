"""These tests run where there are GPUs; elsewhere they are not collected."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
