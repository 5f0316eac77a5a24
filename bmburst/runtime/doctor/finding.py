"""What a check says, and running one so that it cannot end the others."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
    """

    name: str
    run: Callable[[str], Finding]
    needed: bool = False
    with_torch: bool = True


def ask(check: Check) -> Finding:
    """Return a check's finding. One that fails to run is a finding too: the check's subject is broken."""
    try:
        return check.run(check.name)
    except Exception as error:  # whatever a broken installation raises is what the user came to see
        return Finding(check.name, "broken", f"the check itself failed: {type(error).__name__}: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """Return an error's text as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
