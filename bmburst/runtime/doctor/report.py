"""The findings as text for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from bmburst.runtime.doctor.finding import Check, Finding


def can_train(checks: Sequence[Check], findings: Sequence[Finding]) -> bool:
    """Whether nothing that training needs is missing or broken.

    Args:
        checks: What was asked.
        findings: The answers, in the same order.
    """
    pairs = zip(checks, findings, strict=True)
    return not any(check.needed and found.status in ("missing", "broken") for check, found in pairs)


def to_text(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    """Return one line a finding, the command that repairs it under it, and a last line that sums up."""
    width = max(len(found.name) for found in findings)
    lines = []
    for found in findings:
        lines.append(f"{found.status:<8}{found.name:<{width}}  {found.detail}")
        if found.fix:
            lines.append(f"{'':<8}{'':<{width}}  fix: {found.fix}")
    needed = [f.name for c, f in zip(checks, findings, strict=True) if c.needed and f.status in ("missing", "broken")]
    last = "training can run here" if not needed else f"training cannot run here: see {', '.join(needed)}"
    return "\n".join([*lines, "", last])


def to_json(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    """Return {"can_train": bool, "findings": [{"name", "status", "detail", "fix", "needed"}]}."""
    listed = [asdict(f) | {"needed": c.needed} for c, f in zip(checks, findings, strict=True)]
    return json.dumps({"can_train": can_train(checks, findings), "findings": listed}, indent=2)
