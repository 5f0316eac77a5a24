"""What is installed and usable here, and the command that repairs the rest.

`finding` holds what a check says and runs checks so that none can end the others; `system`, `bmtrain`, `nccl`,
`kernels` and `packages` are the checks by subject; `machine_code` reads which GPUs a binary was compiled for; `checks`
is the list; `report` prints it.
"""

from bmburst.runtime.doctor.checks import CHECKS, examine
from bmburst.runtime.doctor.finding import Check, Finding, Status
from bmburst.runtime.doctor.report import can_train, to_json, to_text

__all__ = ["CHECKS", "Check", "Finding", "Status", "can_train", "examine", "to_json", "to_text"]
