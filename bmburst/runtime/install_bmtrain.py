"""Installs BMTrain with pip and without its dependencies: `python -m bmburst.runtime.install_bmtrain`.

One of them, nvidia-nccl-cu11, has files that overwrite those of torch's own NCCL and break `import torch`.
BMTrain has wheels for Linux on x86-64 and Python up to 3.11. Elsewhere a machine without CUDA takes the wheel of 3.11,
for the host runtime replaces all that is compiled in it; a machine with CUDA must build it (`bmburst build-bmtrain`).
"""

import importlib.util
import platform
import subprocess
import sys
import sysconfig

REQUIREMENT = "bmtrain==1.0.1"


def has_wheel() -> bool:
    """Return whether the registry has a wheel for this Python and system."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 12)


def install_command(*, again: bool = False) -> list[str]:
    """Return the pip command that installs BMTrain's wheel, or that of Python 3.11 where this one has none.

    Args:
        again: BMTrain is there already, and does not work.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", *(["--force-reinstall"] if again else [])]
    if not has_wheel():
        command += ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
        command += ["--platform", "manylinux2014_x86_64", "--target", sysconfig.get_path("purelib")]
    return [*command, REQUIREMENT]


def main() -> int:
    """Install BMTrain if it is not there, and return the exit status."""
    if importlib.util.find_spec("bmtrain") is not None:
        return 0
    import torch

    if torch.cuda.is_available() and not has_wheel():
        sys.stderr.write(f"{REQUIREMENT} has no wheel for this Python: bmburst build-bmtrain --install builds it\n")
        return 1
    return subprocess.run(install_command(), check=False, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
