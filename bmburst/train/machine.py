"""What this rank's GPU can train in; asked once BMTrain has started, because the launcher opens no GPU."""

import torch

from bmburst.errors import UserError

_AMPERE = (8, 0)


def require_dtype(dtype: str, device: torch.device) -> None:
    """Check that a rank's device computes in a dtype.

    Args:
        dtype: Of weights and activations, as `TrainConfig` names it.
        device: Of this rank.

    Raises:
        UserError: It is a GPU without bfloat16: BMTrain's kernels and tensor cores have it from Ampere on.
    """
    if dtype != "bfloat16" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _AMPERE:
        raise UserError(
            f"dtype bfloat16 does not work on {torch.cuda.get_device_name(device)} (compute capability "
            f"{'.'.join(map(str, found))})\nallowed: float16, float32\n"
            "fix: --dtype float16, which keeps gradients in range with a loss scale"
        )
