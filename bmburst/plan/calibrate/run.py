"""The whole of `bmburst plan --calibrate`."""

import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from bmburst.plan.calibrate.device import Say, measure_device
from bmburst.plan.calibrate.facts import Fact, complete, measured, render
from bmburst.runtime.launch import LaunchSpec, launch
from bmburst.schedule.hardware import read_facts

_LINKS_TIMEOUT = 60.0  # seconds without an answer after which ranks are ended


def calibrate(base: str, ranks: int, say: Say) -> str:
    """Measure this machine and return its hardware file.

    Args:
        base: The known machine that gives what cannot be measured here.
        ranks: Ranks between which links are measured; 1 measures none.
        say: Told what is being done.

    Raises:
        UserError: The known machine is none, or the ranks cannot start.
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
    """A CPU has no peak of its own here: utilisation is then of the products' rate. Nothing is reserved on it."""
    peak = measured(found["matmul"].value, "FLOP/s", "the rate of its products")
    none = measured(0.0, "bytes", "a CPU")
    return {"peak": peak, "reserved": none, "nccl_memory": none, "workspace": none}


def _links(ranks: int) -> dict[str, Fact]:
    with tempfile.TemporaryDirectory(prefix="bmburst-plan-") as folder:
        file = Path(folder) / "links.json"
        spec = LaunchSpec(nproc=ranks, hang_timeout=_LINKS_TIMEOUT, start_timeout=_LINKS_TIMEOUT, host_runtime=False)
        status = launch(spec, ["-m", "bmburst.plan.calibrate.links", str(file)])
        if status or not file.is_file():
            return {}
        return {key: Fact(*values) for key, values in json.loads(file.read_text(encoding="utf-8")).items()}
