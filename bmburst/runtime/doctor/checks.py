"""Every check, in the order in which a reader can use the answers."""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from bmburst.runtime.doctor import bmtrain, kernels, nccl, system
from bmburst.runtime.doctor.finding import PIP, Check, Finding, ask, one_line
from bmburst.runtime.doctor.kernels import GpuPackage


@dataclass(frozen=True, slots=True)
class Package:
    """A check for a package: `name` is filled in by the list of checks.

    Attributes:
        module: What a program imports.
        distribution: Its name in the registry.
        use: What it is for.
    """

    module: str
    distribution: str
    use: str

    def __call__(self, name: str) -> Finding:
        """Look for the package and import it."""
        if importlib.util.find_spec(self.module) is None:
            return Finding(name, "missing", f"for {self.use}", f"{PIP} install {self.distribution}")
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            fix = f"{PIP} install --force-reinstall {self.distribution}"
            return Finding(name, "broken", one_line(error), fix)
        return Finding(name, "ok", metadata.version(self.distribution))


_FA3 = '--no-build-isolation "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"'
_FROM_AMPERE = frozenset({8, 9, 10, 12})
_TORCH = Check("torch", system.torch, needed=True, with_torch=False)

CHECKS: tuple[Check, ...] = (
    Check("Python", system.python, needed=True, with_torch=False),
    _TORCH,
    Check("GPUs", system.gpus),
    Check("peer access", system.peer_access),
    Check("BMTrain", bmtrain.installed, needed=True),
    Check("BMTrain's machine code", bmtrain.machine_code, needed=True),
    Check("NCCL", nccl.loaded),
    Check("NCCL packages", nccl.packages, needed=True, with_torch=False),
    Check("kernel cpu", kernels.cpu_flash),
    Check("kernel torch", kernels.torch_flash),
    Check("kernel cudnn", kernels.cudnn),
    # Not "flash_attn": flash-attn-4 has a module of that name too.
    Check(
        "kernel fa2",
        GpuPackage("flash_attn.flash_attn_interface", "flash-attn", _FROM_AMPERE, "--no-build-isolation flash-attn"),
    ),
    Check("kernel fa3", GpuPackage("flash_attn_interface", "flash_attn_3", frozenset({9}), _FA3)),
    Check("kernel fa4", GpuPackage("flash_attn.cute", "flash-attn-4", frozenset({9, 10, 12}), "--pre flash-attn-4")),
    Check("triton", GpuPackage("triton", "triton", frozenset(), "triton")),
    Check("cpm-kernels", kernels.cpm_kernels),
    Check("numpy", Package("numpy", "numpy", "BMTrain and the token files"), needed=True, with_torch=False),
    Check("PyYAML", Package("yaml", "PyYAML", "configuration files in YAML"), needed=True, with_torch=False),
    Check("safetensors", Package("safetensors", "safetensors", "checkpoints"), needed=True, with_torch=False),
    Check("tqdm", Package("tqdm", "tqdm", "the progress bar"), needed=True, with_torch=False),
    Check("tensorboard", Package("tensorboard", "tensorboard", "TensorBoard events of a run"), with_torch=False),
    Check("matplotlib", Package("matplotlib", "matplotlib", "the loss plot of a run"), with_torch=False),
    Check("tokenizers", Package("tokenizers", "tokenizers", "tokenizers other than bytes"), with_torch=False),
    Check(
        "transformers", Package("transformers", "transformers", "tokenizers by a Hugging Face name"), with_torch=False
    ),
)


def examine(checks: Sequence[Check] = CHECKS) -> tuple[Finding, ...]:
    """Return the finding of every check, in order. Checks that need a torch that is not there are not asked."""
    torch_works = ask(_TORCH).status == "ok"
    return tuple(
        ask(check)
        if torch_works or not check.with_torch
        else Finding(check.name, "note", "not looked at without torch")
        for check in checks
    )
