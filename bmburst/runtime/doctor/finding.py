"""Findings: the result of a check, running checks so that a failing one cannot stop the rest, text and JSON output."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from bmburst.errors import one_line

Status = Literal["ok", "missing", "broken", "note"]

PIP = f"{sys.executable} -m pip"
BMBURST = f"{sys.executable} -m bmburst"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        name: What was looked at.
        status: "ok": usable; "missing": absent, and `fix` gets it; "broken": there but unusable, and `fix` repairs it;
            "note": a fact that asks for nothing.
        detail: What was found.
        fix: A shell command; empty where there is nothing to do or nothing helps.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A question about this machine.

    Attributes:
        name: What it looks at, also the name of its finding.
        run: Answers it.
        needed: Whether training is impossible while the answer is "missing" or "broken".
        with_torch: Whether it imports torch, and so cannot be asked where that fails.
        apart: Whether it waits for a process of its own, beside which others are asked.
    """

    name: str
    run: Callable[[str], Finding]
    needed: bool = False
    with_torch: bool = True
    apart: bool = False


def ask(check: Check) -> Finding:
    """Return a check's finding. One that fails to run is a finding too: the check's subject is broken."""
    try:
        return check.run(check.name)
    except Exception as error:  # whatever a broken installation raises is what the user came to see
        return Finding(check.name, "broken", f"the check itself failed: {type(error).__name__}: {one_line(error)}")


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
