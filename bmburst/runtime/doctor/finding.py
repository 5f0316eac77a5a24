"""Checks and their results, `Finding`: runs checks so that a failing check does not stop the others; text and JSON."""

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
        name: Subject of the check.
        status: "ok": usable; "missing": absent, `fix` installs it; "broken": present but unusable, `fix` repairs it;
            "note": for information, no action needed.
        detail: The result in words.
        fix: A shell command; empty if nothing needs to be done or no command helps.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of this machine.

    Attributes:
        name: Subject of the check, also the name of its finding.
        run: Function that returns the finding.
        needed: Whether training is impossible while the finding is "missing" or "broken".
        with_torch: Whether it imports torch, so it is skipped if torch cannot be imported.
        apart: Whether it waits for a separate process, so that other checks can run meanwhile.
    """

    name: str
    run: Callable[[str], Finding]
    needed: bool = False
    with_torch: bool = True
    apart: bool = False


def ask(check: Check) -> Finding:
    """Run a check and return its finding. If the check itself fails, its subject is broken."""
    try:
        return check.run(check.name)
    except Exception as error:  # a broken installation may raise anything, and the user must see it
        return Finding(check.name, "broken", f"the check itself failed: {type(error).__name__}: {one_line(error)}")


def can_train(checks: Sequence[Check], findings: Sequence[Finding]) -> bool:
    """Return whether nothing that training needs is missing or broken.

    Args:
        checks: The checks.
        findings: Their findings, in the same order.
    """
    pairs = zip(checks, findings, strict=True)
    return not any(check.needed and found.status in ("missing", "broken") for check, found in pairs)


def to_text(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    """Return one line per finding, followed by its repair command if any, and a summary as last line."""
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
