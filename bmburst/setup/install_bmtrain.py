"""Installs BMTrain with pip and without its dependencies: `python -m bmburst.setup.install_bmtrain`.

One of the dependencies, nvidia-nccl-cu11, overwrites files of torch's NCCL package and breaks `import torch`. BMTrain
has wheels for Linux on x86-64 and Python up to 3.11. On other systems without CUDA the wheel for 3.11 is installed,
because the host runtime replaces all compiled code in it. A machine with CUDA must build a wheel
(`bmburst build-bmtrain`).
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
    """Return the pip command that installs BMTrain's wheel, or the wheel for Python 3.11 if this Python has none.

    Args:
        again: Whether BMTrain is installed already but does not work.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", *(["--force-reinstall"] if again else [])]
    if not has_wheel():
        command += ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
        command += ["--platform", "manylinux2014_x86_64", "--target", sysconfig.get_path("purelib")]
    return [*command, REQUIREMENT]


def main() -> int:
    """Install BMTrain if it is not installed, and return the exit status."""
    if importlib.util.find_spec("bmtrain") is not None:
        return 0
    import torch

    if torch.cuda.is_available() and not has_wheel():
        sys.stderr.write(f"{REQUIREMENT} has no wheel for this Python: bmburst build-bmtrain --install builds it\n")
        return 1
    return subprocess.run(install_command(), check=False, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
