"""What is installed and usable here, and the command that repairs the rest.

`finding` runs a check, catches its failure, and writes findings as text or JSON. `system`, `bmtrain`, `nccl` and
`kernels` are the checks by subject, `checks` lists them all, and `machine_code` reads which GPUs a binary was compiled
for.
"""

from bmburst.runtime.doctor.checks import CHECKS, examine
from bmburst.runtime.doctor.finding import Check, Finding, Status, can_train, to_json, to_text

__all__ = ["CHECKS", "Check", "Finding", "Status", "can_train", "examine", "to_json", "to_text"]
