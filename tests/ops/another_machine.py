"""A machine that is not here, for the rules of kernels: its GPU, its cuDNN and its packages."""

from bmburst_ops.machine import Machine


class AnotherMachine(Machine):
    """A machine with GPUs of one kind. `asked` lists the devices that were looked at.

    Args:
        capability: Compute capability of its GPUs.
        installed: Its distributions with their versions, and its modules. A fourth number is that of a beta.
        cudnn: Version of its cuDNN.
        cpu: Vector instructions of its CPU.
    """

    def __init__(self, capability=(9, 0), installed=(), cudnn=91900, cpu="AVX512"):
        self._capability, self._installed, self._cudnn, self._cpu = capability, dict(installed), cudnn, cpu
        self.asked = []

    def capability(self, device):
        self.asked.append(device)
        return self._capability

    def gpu(self, device):
        self.asked.append(device)
        return "a GPU"

    def cpu(self):
        return self._cpu

    def cudnn(self):
        return self._cudnn

    def version(self, distribution):
        found = self._installed.get(distribution)
        return None if found is None else found[:3]

    def beta(self, distribution):
        found = self._installed.get(distribution) or ()
        return found[3] if len(found) > 3 else None

    def has(self, module):
        return module in self._installed
