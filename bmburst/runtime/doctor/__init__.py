"""Checks which software is installed and usable on this machine, and gives commands that repair the rest.

`finding` runs a check, catches its failure, and writes findings as text or JSON. `system` contains checks of Python,
torch, GPUs and NCCL; `bmtrain` those of BMTrain; `checks` those of kernels and packages, and the list of all checks.
"""

from bmburst.runtime.doctor.checks import CHECKS, examine
from bmburst.runtime.doctor.finding import Check, Finding, Status, can_train, to_json, to_text

__all__ = ["CHECKS", "Check", "Finding", "Status", "can_train", "examine", "to_json", "to_text"]
