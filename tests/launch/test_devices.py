"""The launcher's GPUs are those that torch has in the ranks: asked of the driver, without torch."""

import importlib.util

import pytest
import torch

from bmburst.launch.devices import Gpu, ask_driver, cuda_of_torch


class Driver:
    """libcuda with two GPUs."""

    NAMES, CAPABILITIES = (b"NVIDIA H100 80GB HBM3", b"Tesla T4"), ((9, 0), (7, 5))

    def __init__(self, version=12080, status=0):
        self.version, self.status = version, status

    def cuInit(self, flags):
        assert flags == 0
        return self.status

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.NAMES)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = 40 + index

    def cuDeviceGetName(self, name, size, device):
        assert len(name) == size
        name.value = self.NAMES[device.value - 40]

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.CAPABILITIES[device.value - 40][{75: 0, 76: 1}[attribute]]


@pytest.mark.parametrize(
    ("driver", "build", "count"),
    [
        (Driver(), 12, 2),
        (Driver(13000), 12, 2),  # newer drivers run older programs
        (Driver(12080), 13, 0),
        (Driver(status=100), 12, 0),  # CUDA_ERROR_NO_DEVICE
    ],
)
def test_the_driver_is_asked(driver, build, count):
    both = (Gpu("NVIDIA H100 80GB HBM3", (9, 0)), Gpu("Tesla T4", (7, 5)))
    assert ask_driver(driver, build) == both[:count]


@pytest.mark.parametrize(
    ("line", "found"),
    [("cuda: Optional[str] = '12.8'", 12), ("cuda = '13.0'", 13), ("cuda: Optional[str] = None", None)],
)
def test_torchs_cuda_is_read_without_importing_it(line, found, tmp_path):
    real = torch.version.cuda
    assert cuda_of_torch() == (None if real is None else int(real.partition(".")[0]))
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is imported')")
    (package / "version.py").write_text(f"__version__ = '2.9.0+cu126'\ndebug = False\n{line}\nhip = '6.1'\n")
    spec = importlib.util.spec_from_file_location("torch", package / "__init__.py")
    assert cuda_of_torch(lambda _: spec) == found
