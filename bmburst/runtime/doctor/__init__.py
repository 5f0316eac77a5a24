"""Checks what is installed and usable here, and names the command that repairs the rest.

`finding` runs a check, catches its failure, and writes findings as text or JSON. `system` (Python, torch, GPUs, NCCL)
and `bmtrain` are checks by subject; `checks` has those of kernels and packages, and lists them all.
"""

from bmburst.runtime.doctor.checks import CHECKS, examine
from bmburst.runtime.doctor.finding import Check, Finding, Status, can_train, to_json, to_text

__all__ = ["CHECKS", "Check", "Finding", "Status", "can_train", "examine", "to_json", "to_text"]
