"""`bmburst plan --calibrate`: measures this machine and writes its hardware file, each number with its source."""

import json
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bmburst.plan.rates import Fact, PrintLine, measure_device, measured
from bmburst.runtime.launch import LaunchSpec, launch
from bmburst.schedule.hardware import NUMBERS, hardware_from, read_facts

_LINKS_TIMEOUT = 60.0  # seconds without an answer after which ranks are ended


def calibrate(base: str, ranks: int, say: PrintLine) -> str:
    """Measure this machine and return its hardware file.

    Args:
        base: Name or file of the hardware whose numbers stand in for those that cannot be measured here.
        ranks: Number of ranks between which links are measured; 1 measures none.
        say: Prints a line of progress.

    Raises:
        UserError: `base` is unknown, or the ranks cannot start.
    """
    known = read_facts(base)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(0) if on_gpu else f"{platform.machine()} CPU"
    found = measure_device(device, say)
    if not on_gpu:
        found |= _of_a_cpu(found)
    if ranks > 1:
        say(f"links between {ranks} ranks")
        found |= _links(ranks)
    facts = complete(found, known, base)
    left = sum(fact.kind != "measured" for fact in facts.values())
    head = f"Measured {time.strftime('%Y-%m-%d')} by bmburst plan --calibrate; {left} numbers are not, see their kind."
    say(f"{len(facts) - left} numbers measured, {left} as on {base}")
    return render(name, facts, head)


def _of_a_cpu(found: dict[str, Fact]) -> dict[str, Fact]:
    """Return the numbers of a CPU: its peak is the measured rate of matrix products, and it reserves no memory."""
    peak = measured(found["matmul"].value, "FLOP/s", "the rate of its products")
    none = measured(0.0, "bytes", "a CPU")
    return {"peak": peak, "reserved": none, "nccl_memory": none, "workspace": none}


def _links(ranks: int) -> dict[str, Fact]:
    with tempfile.TemporaryDirectory(prefix="bmburst-plan-") as folder:
        file = Path(folder) / "links.json"
        spec = LaunchSpec(nproc=ranks, hang_timeout=_LINKS_TIMEOUT, start_timeout=_LINKS_TIMEOUT, host_runtime=False)
        status = launch(spec, ["-m", "bmburst.plan.rates", str(file)])
        if status or not file.is_file():
            return {}
        return {key: Fact(*values) for key, values in json.loads(file.read_text(encoding="utf-8")).items()}


def complete(found: Mapping[str, Fact], base: Mapping[str, Any], name: str) -> dict[str, Fact]:
    """Return every number of a hardware file: those found, and the others as they are on a known machine.

    Args:
        found: What was measured.
        base: The known machine's file, as `bmburst.schedule.hardware.read_facts` returns it.
        name: The known machine's name.
    """
    taken = {
        key: Fact(float(base[key]["value"]), base[key]["unit"], "assumed", f"not measured here: as on {name}")
        for key in NUMBERS
    }
    return taken | dict(found)


def render(name: str, facts: Mapping[str, Fact], head: str) -> str:
    """Return a hardware file.

    Args:
        name: Of the machine.
        facts: Every number.
        head: What stands at its top, in one line.
    """
    lines = [f"# {head}", f"name = {_text(name)}"]
    for key in NUMBERS:
        fact = facts[key]
        lines += ["", f"[{key}]", f"value = {float(fact.value)!r}", f"unit = {_text(fact.unit)}"]
        lines += [f"kind = {_text(fact.kind)}", f"source = {_text(fact.source)}"]
    text = "\n".join(lines) + "\n"
    hardware_from({"name": name} | {key: {"value": fact.value} for key, fact in facts.items()}, "what was measured")
    return text


def _text(value: str) -> str:
    plain = "".join(character if character.isprintable() else " " for character in value)
    return '"' + plain.replace("\\", "\\\\").replace('"', "'") + '"'
