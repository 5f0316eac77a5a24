"""Install BMTrain without its dependency on nvidia-nccl-cu11: `python -m bmburst.runtime.install_bmtrain`.

That dependency's files overwrite those of torch's own NCCL and break `import torch`. Where the registry has no wheel
for this Python, a machine without CUDA takes the pure Python part of another Python's wheel: the host runtime replaces
BMTrain's machine code anyway. With CUDA it must be built: `bmburst build-bmtrain`.
"""

import importlib.util
import subprocess
import sys
import sysconfig

REQUIREMENT = "bmtrain==1.0.1"
OTHER_PYTHON = "3.11"  # the newest with a wheel


def install_command(python: str | None = None) -> list[str]:
    """Return the pip command that installs BMTrain, from this Python's wheel or from that of `python`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    if python is None:
        return [*pip, REQUIREMENT]
    foreign = ["--python-version", python, "--implementation", "cp"]
    foreign += ["--platform", "manylinux2014_x86_64", "--target", sysconfig.get_paths()["purelib"]]
    return [*pip, *foreign, REQUIREMENT]


def main() -> int:
    """Install BMTrain if it is not there; return the exit status."""
    if importlib.util.find_spec("bmtrain") is not None:
        return 0
    if subprocess.run(install_command(), check=False).returncode == 0:
        return 0
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        sys.stderr.write(f"no wheel of {REQUIREMENT} for this Python: bmburst build-bmtrain --install builds it\n")
        return 1
    sys.stderr.write("no wheel for this Python: installing BMTrain's Python part for the host runtime\n")
    return subprocess.run(install_command(OTHER_PYTHON), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
