"""Checks which software is installed and usable on this machine, and gives commands that repair the rest.

This module lists all checks in the order of the output, runs them so that a failing check does not stop the others, and
writes their findings as text or JSON. `system` contains the checks of Python, torch, GPUs and NCCL, and `bmtrain` those
of BMTrain; those of attention kernels and packages are here.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from bmburst.errors import one_line
from bmburst.setup import bmtrain, system
from bmburst.setup.bmtrain import capabilities
from bmburst.setup.kernel_caches import kernel_caches
from bmburst.setup.system import PIP, Finding, Status

if TYPE_CHECKING:
    from bmburst_ops.machine import Machine

__all__ = ["CHECKS", "Check", "Finding", "Status", "can_train", "examine", "to_json", "to_text"]


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


def cpu_flash(name: str, machine: "Machine | None" = None) -> Finding:
    """Run torch's flash kernel for CPUs and check its log-sum-exp, which the ring needs; look for a C compiler.

    Args:
        name: Name of the finding.
        machine: The machine whose CPU it is; default: this one.
    """
    import torch

    from bmburst_ops.fused import find_compiler
    from bmburst_ops.machine import HERE

    q = torch.ones(1, 2, 5, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, False)
    if tuple(out.shape) != (1, 2, 5, 8) or tuple(lse.shape) != (1, 2, 5):
        return Finding(name, "broken", f"returns a log-sum-exp of shape {tuple(lse.shape)}, not (1, 2, 5)")
    if (machine or HERE).cpu() != "AVX512":
        return Finding(name, "ok", "in torch")
    compiler = find_compiler()
    how = f"compiled by {compiler}" if compiler else "in half of the time with a C compiler: install gcc"
    return Finding(name, "ok", f"in torch; long fp32 tiles {how}")


def torch_flash(name: str) -> Finding:
    """Check that torch has its flash kernel for GPUs."""
    import torch

    return _in_torch(name, torch.backends.cuda.is_flash_attention_available, lambda: "in torch")


def cudnn(name: str) -> Finding:
    """Check that torch has cuDNN."""
    import torch

    return _in_torch(name, torch.backends.cudnn.is_available, lambda: str(torch.backends.cudnn.version()))


def _in_torch(name: str, is_there: Callable[[], bool], detail: Callable[[], str]) -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding(name, "note", "needs a GPU")
    if not is_there():
        return Finding(name, "missing", "this build of torch has none", f"{PIP} install --force-reinstall torch")
    return Finding(name, "ok", detail())


@dataclass(frozen=True, slots=True)
class GpuPackageCheck:
    """A check for a package of GPU kernels: `name` is filled in by the list of checks.

    Attributes:
        module: Name of the module to import.
        distribution: Name of the package in the registry.
        generations: First digits of the compute capabilities that it has kernels for; empty: all.
        install: Arguments of pip install.
    """

    module: str
    distribution: str
    generations: frozenset[int]
    install: str

    def __call__(self, name: str, gpus: list[int] | None = None) -> Finding:
        """Look for the package and import it, for GPUs of these compute capabilities, by default this machine's."""
        gpus = capabilities() if gpus is None else gpus
        if not gpus:
            return Finding(name, "note", "needs a GPU")
        if self.generations and not all(sm // 10 in self.generations for sm in gpus):
            kinds = ", ".join(f"sm_{generation}x" for generation in sorted(self.generations))
            return Finding(name, "note", f"has kernels for {kinds} alone")
        return _imported(name, self.module, self.distribution, "not installed", self.install, again="--no-deps ")


FLASH_ATTENTION_4 = GpuPackageCheck("flash_attn.cute", "flash-attn-4", frozenset({9, 10, 12}), "--pre flash-attn-4")


def flash_attention_4(name: str, gpus: list[int] | None = None, machine: "Machine | None" = None) -> Finding:
    """Check for flash-attn-4, by the rule of its versions too."""
    from bmburst_ops.flash.fa4 import unusable
    from bmburst_ops.machine import HERE

    found = FLASH_ATTENTION_4(name, gpus)
    reason = unusable(machine or HERE) if found.status == "ok" else None
    if reason is not None:
        found = Finding(name, "broken", reason, f"{PIP} install --upgrade {FLASH_ATTENTION_4.install}")
    return found


def linear_attention(name: str, gpus: list[int] | None = None, machine: "Machine | None" = None) -> Finding:
    """Check whether Triton computes recurrent layers on GPUs, by default this machine's, by its rules of versions."""
    from bmburst_ops.linear.triton import unusable
    from bmburst_ops.machine import HERE

    gpus, machine = capabilities() if gpus is None else gpus, machine or HERE
    if not gpus:
        return Finding(name, "note", "needs a GPU")
    version = machine.version("triton")
    for sm in sorted(gpus):
        if (found := unusable((sm // 10, sm % 10), machine)) is not None:
            status: Status = "missing" if version is None else "broken"
            return Finding(name, status, f"in plain torch: {found[0]}", found[1])
    return Finding(name, "ok", f"Triton {'.'.join(map(str, version or ()))}")


def _caches_of_gpus(name: str) -> Finding:
    return kernel_caches(name) if capabilities() else Finding(name, "note", "needs a GPU")


def _imported(name: str, module: str, distribution: str, absent: str, install: str, *, again: str = "") -> Finding:
    """Import a module. `absent` is the detail if it is missing, `again` are pip's options to replace a broken one."""
    if not _is_there(module):
        return Finding(name, "missing", absent, f"{PIP} install {install}")
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return Finding(name, "broken", one_line(error), f"{PIP} install --force-reinstall {again}{install}")
    return Finding(name, "ok", _version(distribution))


def _is_there(module: str) -> bool:
    """Return whether a module can be found. Its parent packages are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "installed"


def package(module: str, use: str, name: str) -> Finding:
    """Look for a package, by the name of its module and of the check, and import it. `use` says what it is for."""
    return _imported(name, module, name, f"for {use}", name)


_FA3 = '--no-build-isolation "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"'
_FROM_AMPERE = frozenset({8, 9, 10, 12})
_TORCH = Check("torch", system.torch, needed=True, with_torch=False)

CHECKS: tuple[Check, ...] = (
    Check("Python", system.python, needed=True, with_torch=False),
    _TORCH,
    Check("GPUs", system.gpus),
    Check("peer access", system.peer_access),
    Check("BMTrain", bmtrain.installed, needed=True, apart=True),
    Check("BMTrain's machine code", bmtrain.machine_code, needed=True),
    Check("NCCL", system.nccl_loaded),
    Check("NCCL packages", system.nccl_packages, needed=True, with_torch=False),
    Check("kernel cpu", cpu_flash),
    Check("kernel torch", torch_flash),
    Check("kernel cudnn", cudnn),
    # Not "flash_attn": flash-attn-4 also has a module of that name.
    Check(
        "kernel fa2",
        GpuPackageCheck(
            "flash_attn.flash_attn_interface", "flash-attn", _FROM_AMPERE, "--no-build-isolation flash-attn"
        ),
    ),
    Check("kernel fa3", GpuPackageCheck("flash_attn_interface", "flash_attn_3", frozenset({9}), _FA3)),
    Check("kernel fa4", flash_attention_4),
    Check("triton", GpuPackageCheck("triton", "triton", frozenset(), "triton")),
    Check("recurrent layers", linear_attention),
    Check("kernel caches", _caches_of_gpus),
    Check("numpy", partial(package, "numpy", "BMTrain and the token files"), needed=True, with_torch=False),
    Check("PyYAML", partial(package, "yaml", "configuration files in YAML"), needed=True, with_torch=False),
    Check("safetensors", partial(package, "safetensors", "checkpoints"), needed=True, with_torch=False),
    Check("tqdm", partial(package, "tqdm", "the progress bar"), needed=True, with_torch=False),
    Check("tensorboard", partial(package, "tensorboard", "TensorBoard events of a run"), with_torch=False),
    Check("matplotlib", partial(package, "matplotlib", "the loss plot of a run"), with_torch=False),
    Check("tokenizers", partial(package, "tokenizers", "tokenizers other than bytes"), with_torch=False),
    Check("transformers", partial(package, "transformers", "tokenizers by a Hugging Face name"), with_torch=False),
)


def examine(checks: Sequence[Check] = CHECKS) -> tuple[Finding, ...]:
    """Return the finding of every check, in order. Checks that need torch are skipped if torch is missing."""
    with ThreadPoolExecutor() as pool:
        begun = {check.name: pool.submit(ask, check) for check in checks if check.apart}
        torch_works = ask(_TORCH).status == "ok"
        found = {}
        for check in sorted(checks, key=lambda check: check.apart):
            if check.with_torch and not torch_works:
                found[check.name] = Finding(check.name, "note", "not looked at without torch")
            else:
                found[check.name] = begun[check.name].result() if check.apart else ask(check)
    return tuple(found[check.name] for check in checks)


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
    return not _blocking(checks, findings)


def _blocking(checks: Sequence[Check], findings: Sequence[Finding]) -> list[str]:
    """Return the names of missing or broken subjects that training needs."""
    return [f.name for c, f in zip(checks, findings, strict=True) if c.needed and f.status in ("missing", "broken")]


def to_text(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    """Return one line per finding, followed by its repair command if any, and a summary as last line."""
    width = max(len(found.name) for found in findings)
    lines = []
    for found in findings:
        lines.append(f"{found.status:<8}{found.name:<{width}}  {found.detail}")
        if found.fix:
            lines.append(f"{'':<8}{'':<{width}}  fix: {found.fix}")
    blocking = _blocking(checks, findings)
    last = f"training cannot run here: see {', '.join(blocking)}" if blocking else "training can run here"
    return "\n".join([*lines, "", last])


def to_json(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    """Return {"can_train": bool, "findings": [{"name", "status", "detail", "fix", "needed"}]}."""
    listed = [asdict(f) | {"needed": c.needed} for c, f in zip(checks, findings, strict=True)]
    return json.dumps({"can_train": can_train(checks, findings), "findings": listed}, indent=2)
