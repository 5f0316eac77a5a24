"""What the doctor finds on made-up machines, that no check can end the others, and this machine's own report."""

import argparse
import importlib.machinery
import json
import os
import random
import sys
import types
from email.message import Message
from pathlib import Path

import pytest
import torch

from bmburst.cli.machine import run_doctor
from bmburst.setup import doctor
from bmburst.setup.bmtrain import MachineCode, read_machine_code
from bmburst.setup.doctor import Check, Finding, bmtrain, can_train, examine, system, to_json, to_text
from bmburst.setup.kernel_caches import folders, kernel_caches
from tests.distributed.started import run_bmburst
from tests.ops.another_machine import AnotherMachine
from tests.refusals import says
from tests.setup.fatbin import fat_binary

PTX, CUBIN = 1, 2


def test_machine_code_of_several_containers_among_other_bytes():
    rng = random.Random(0)
    noise = [rng.randbytes(rng.randrange(1, 200)) for _ in range(4)]
    magic = bytes.fromhex("50ed55ba01001000")  # by chance, before something that is no container
    binary = noise[0] + fat_binary((PTX, 61), (CUBIN, 61)) + noise[1] + magic + b"\xff" * 8 + noise[2]
    binary += fat_binary((CUBIN, 80), (PTX, 80), (CUBIN, 90), (64, 33)) + noise[3] + fat_binary()
    code = read_machine_code(binary)
    assert (code.cubins, code.ptx) == ({61, 80, 90}, {61, 80})
    assert str(code) == "sm_61 sm_80 sm_90, PTX compute_61 compute_80"


@pytest.mark.parametrize("keep", [0, 1, 8, 15, 16, 40, 79])
def test_truncated_binaries_are_read_without_error(keep):
    assert read_machine_code(fat_binary((CUBIN, 90))[:keep]) == MachineCode()


@pytest.mark.parametrize(
    ("cubins", "ptx", "capability", "runs"),
    [
        ({80}, (), 80, True),
        ({80}, (), 86, True),
        ({86}, (), 80, False),
        ({90}, (), 100, False),
        ({61, 86}, {80}, 90, True),
        ({61}, {61}, 60, False),
        ((), {100}, 90, False),
        ((), (), 90, False),
        ({120}, (), 121, True),
    ],
)
def test_which_gpus_run_which_code(cubins, ptx, capability, runs):
    assert MachineCode(cubins=frozenset(cubins), ptx=frozenset(ptx)).runs_on(capability) is runs


@pytest.mark.parametrize(
    ("cubins", "ptx", "gpus", "status", "word", "fix"),
    [
        ({90}, (), [90, 90], "ok", "sm_90", ""),
        ({61, 80}, {80}, [90], "ok", "the driver compiles its PTX for sm_90", ""),
        ({61, 80}, (), [80, 90], "broken", "nothing that sm_90", "build-bmtrain --install --arch 80 90"),
        ((), (), [90], "broken", "no GPU code", "build-bmtrain --install --arch 90"),
        ({90}, (), [], "note", "no GPU here", ""),
    ],
)
def test_bmtrains_machine_code_against_the_gpus(cubins, ptx, gpus, status, word, fix):
    found = bmtrain.judge("code", MachineCode(cubins=frozenset(cubins), ptx=frozenset(ptx)), gpus)
    assert (found.status, word in found.detail) == (status, True)
    assert found.fix.endswith(fix) and bool(found.fix) == bool(fix)


def package(monkeypatch, folder, name):
    """Make `name` an importable package in `folder`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return folder / name


@pytest.mark.parametrize(("gpus", "status"), [([90], "broken"), ([80], "ok"), ([], "note")])
def test_the_extension_of_this_python_is_read_and_no_other(gpus, status, tmp_path, monkeypatch):
    folder = package(monkeypatch, tmp_path, "bmtrain")
    (folder / "C.cpython-27-x86_64-linux-gnu.so").write_bytes(fat_binary((CUBIN, 90)))
    lacking = bmtrain.machine_code("code", gpus)
    assert lacking.status == ("missing" if gpus else "note") and "cpython-27" in lacking.detail
    (folder / f"C{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(fat_binary((CUBIN, 80)))
    assert bmtrain.machine_code("code", gpus).status == status


def test_a_bmtrain_that_does_not_import_is_broken(tmp_path, monkeypatch):
    folder = package(monkeypatch, tmp_path, "bmtrain")
    (folder / "__init__.py").write_text("raise ImportError('libnccl.so.2: undefined symbol')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = bmtrain.installed("BMTrain", [])
    assert found.status == "broken" and "undefined symbol" in found.detail and "--no-deps" in found.fix


def test_a_bmtrain_that_is_not_there_is_missing():
    found = bmtrain.installed("BMTrain", [], find=lambda _: None)
    assert found.status == "missing" and "bmtrain==1.0.1" in found.fix and "--no-deps" in found.fix


def test_caches_of_kernels_are_found_and_those_that_others_can_fill_are_broken(tmp_path):
    own, environ = tmp_path / "own", {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "TRITON_HOME": "/home/a"}
    environ |= {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(own)}
    found = folders(environ)
    assert found == {"triton": Path("/home/a/.triton/cache"), "flash-attn-4": own}
    assert folders(environ | {"TRITON_CACHE_DIR": "/c"})["triton"] == Path("/c")
    assert folders({"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"})["flash-attn-4"] is None
    found = {"triton": tmp_path / "not" / "yet", "flash-attn-4": None}
    told = kernel_caches("caches", found)
    assert told.status == "ok" and "not/yet (0 bytes)" in told.detail and "compiled again" in told.detail
    own.mkdir()
    (own / "kernel.so").write_bytes(bytes(3 << 20))
    told = kernel_caches("caches", {"triton": own})
    assert told.status == "ok" and "3.0 MiB" in told.detail
    own.chmod(0o777)
    told = kernel_caches("caches", {"triton": own})
    assert told.status == "broken" and "other users" in told.detail and told.fix == f"rm -r {own}"


class FakePackage:
    """A distribution whose RECORD lists files with the sizes they were installed with."""

    def __init__(self, root, name, version, files):
        self.metadata = Message()
        self.metadata["Name"], self.version, self._root = name, version, root
        self.files = []
        for path, size in files.items():
            entry = types.SimpleNamespace(name=Path(path).name, suffix=Path(path).suffix, path=path, size=size)
            self.files.append(entry)

    def locate_file(self, entry):
        return self._root / entry.path


LIBRARY = "nvidia/nccl/lib/libnccl.so.2"


def installed(root, *names, wanted="nvidia-nccl-cu13==2.28.9", size=6):
    """Packages of a Python: these of NCCL beside a torch that wants `wanted`."""
    (root / LIBRARY).parent.mkdir(parents=True, exist_ok=True)
    (root / LIBRARY).write_bytes(b"sixsix")
    files = {LIBRARY: size, "nvidia/__init__.py": 0}
    found = [FakePackage(root, name, "2.28.9", files) for name in names] + [FakePackage(root, "numpy", "2", {})]
    needs = ["filelock", f"{wanted}; platform_system == 'Linux'"] if wanted else ["filelock"]
    return types.SimpleNamespace(distributions=lambda: found, version=lambda _: "2.28.9", requires=lambda _: needs)


def nccl_packages(*words, **options):
    return system.nccl_packages("NCCL packages", installed(*words, **options))


def test_one_whole_nccl_package_is_fine(tmp_path):
    found = nccl_packages(tmp_path, "nvidia-nccl-cu13")
    assert (found.status, found.detail) == ("ok", "nvidia-nccl-cu13 2.28.9")


def test_two_nccl_packages_overwrite_each_other(tmp_path):
    found = nccl_packages(tmp_path, "nvidia-nccl-cu11", "nvidia-nccl-cu13")
    assert found.status == "broken" and "nvidia-nccl-cu11 and nvidia-nccl-cu13 own the same files" in found.detail
    remove, repair = found.fix.split("; ")
    assert remove.endswith("uninstall -y nvidia-nccl-cu11")
    assert repair.endswith("install --force-reinstall --no-deps nvidia-nccl-cu13==2.28.9")


def test_packages_that_torch_does_not_use_are_no_harm(tmp_path):
    found = nccl_packages(tmp_path, "nvidia-nccl-cu11", "nvidia-nccl-cu12", wanted=None)
    assert found.status == "note"
    assert nccl_packages(tmp_path, wanted=None).status == "note"


def test_a_library_that_uninstalling_another_package_removed(tmp_path):
    (tmp_path / LIBRARY).parent.mkdir(parents=True)
    found = nccl_packages(tmp_path, "nvidia-nccl-cu13", size=7)
    assert found.status == "broken" and "gone or another package's" in found.detail
    assert "uninstall" not in found.fix and found.fix.endswith("nvidia-nccl-cu13==2.28.9")
    assert nccl_packages(tmp_path).status == "broken", "none at all where torch needs one"


def test_the_loaded_library_is_read_from_the_map():
    maps = """7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/libc.so.6
7f02-7f03 r--p 00000000 08:01 43    /site packages/nvidia/nccl/lib/libnccl.so.2
7f03-7f04 r-xp 00000000 08:01 43    /site packages/nvidia/nccl/lib/libnccl.so.2
7f05-7f06 rw-p 00000000 00:00 0
7f07-7f08 rw-p 00000000 00:00 0     [stack]
"""
    assert system.mapped_libraries(maps) == ["/site packages/nvidia/nccl/lib/libnccl.so.2"]
    assert system.nccl_loaded("NCCL").status == ("ok" if torch.version.cuda else "note")


def fail(name):
    raise KeyError(f"{name}\nnever\nseen")


def fine(name):
    return Finding(name, "ok", "fine")


def lacking(name):
    return Finding(name, "missing", "gone", "get it")


def test_a_check_that_fails_to_run_is_a_finding():
    findings = examine((Check("a", fail), Check("b", fine)))
    assert [f.status for f in findings] == ["broken", "ok"]
    assert "KeyError" in findings[0].detail and "\n" not in findings[0].detail


def test_without_torch_its_checks_are_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = examine(
        (Check("torch", system.torch, with_torch=False), Check("a", fail), Check("b", fine, with_torch=False))
    )
    assert [f.status for f in findings] == ["missing", "note", "ok"]
    assert findings[0].fix.endswith("pip install torch")


def test_a_torch_with_anothers_nccl_gets_the_command_that_repairs_it(monkeypatch, tmp_path):
    packages = installed(tmp_path, "nvidia-nccl-cu11", "nvidia-nccl-cu13")

    class Broken:
        def find_spec(self, name, *_):
            if name == "torch":
                raise ImportError("libtorch_cuda.so: undefined symbol: ncclCommWindowDeregister")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    found = system.torch("torch", packages)
    assert found.status == "broken" and "uninstall -y nvidia-nccl-cu11; " in found.fix


def test_only_what_training_needs_decides():
    needed, optional = Check("needed", lacking, needed=True), Check("optional", lacking)
    assert can_train((optional,), examine((optional,)))
    assert not can_train((optional, needed), examine((optional, needed)))
    text = to_text((optional, needed), examine((optional, needed)))
    assert text.splitlines()[0] == "missing optional  gone" and "fix: get it" in text.splitlines()[1]
    assert text.endswith("training cannot run here: see needed")


def test_a_broken_package_is_told_from_a_missing_one(tmp_path, monkeypatch):
    folder = package(monkeypatch, tmp_path, "bmburst_test_package")
    (folder / "__init__.py").write_text("import no_such_module_at_all\n")
    found = doctor.package("bmburst_test_package", "nothing", "some-name")
    assert found.status == "broken" and found.fix.endswith("--force-reinstall some-name")
    found = doctor.package("bmburst_no_package", "nothing", "some-name")
    assert found.status == "missing" and found.fix.endswith("pip install some-name")


@pytest.mark.parametrize(("gpus", "status"), [([], "note"), ([75], "note"), ([90], "missing")])
def test_kernels_are_asked_for_on_gpus_that_they_can_run_on(gpus, status):
    look = doctor.GpuPackageCheck("bmburst_no_package.cute", "some-name", frozenset({9, 10}), "--pre some-name")
    found = look("kernel", gpus)
    assert found.status == status
    assert found.fix.endswith("pip install --pre some-name") == (status == "missing")


def test_an_old_beta_of_flash_attention_4_is_broken(monkeypatch):
    cute = types.ModuleType("flash_attn.cute")
    cute.__spec__ = importlib.machinery.ModuleSpec("flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    for beta, status in ((35, "broken"), (36, "ok")):
        found = doctor.flash_attention_4(
            "kernel fa4", [90], AnotherMachine(installed={"flash-attn-4": (4, 0, 0, beta)})
        )
        assert found.status == status
        if status == "broken":
            says(found.detail, "4.0.0b36 or newer", "4.0.0b35")
            assert found.fix.endswith("pip install --upgrade --pre flash-attn-4")


@pytest.mark.parametrize(
    ("gpus", "installed", "status", "words", "fix"),
    [
        ([], {}, "note", "needs a GPU", ""),
        ([90], {}, "missing", "plain torch | triton", "pip install triton"),
        ([80, 90], {"triton": (3, 7, 0)}, "broken", "plain torch | Triton 3.7.0 | Hopper | 3.6 | 3.7.1", "torch 2.13"),
        ([75], {"triton": (3, 7, 1)}, "broken", "8.0", "reference"),
        ([80], {"triton": (3, 7, 0)}, "ok", "3.7.0", ""),
        ([90], {"triton": (3, 6, 0)}, "ok", "3.6.0", ""),
        ([90], {"triton": (3, 7, 1)}, "ok", "3.7.1", ""),
    ],
)
def test_kernels_of_recurrent_layers_have_rules_of_versions(gpus, installed, status, words, fix):
    found = doctor.linear_attention("recurrent layers", gpus, AnotherMachine(installed=installed))
    assert (found.status, bool(found.fix)) == (status, bool(fix))
    says(found.detail, words)
    says(found.fix, fix)


class FakeCuda:
    """torch.cuda of a machine with GPUs that cannot all reach each other."""

    def __init__(self, count, apart=()):
        self._count, self._apart = count, apart

    def is_available(self):
        return self._count > 0

    def device_count(self):
        return self._count

    def can_device_access_peer(self, a, b):
        assert a != b
        return (a, b) not in self._apart


@pytest.mark.parametrize(
    ("count", "apart", "status", "word"),
    [(0, (), "note", "no GPUs"), (1, (), "note", "1 GPU "), (3, (), "ok", "all 3"), (3, ((2, 0),), "note", "2->0")],
)
def test_peer_access_of_every_pair(count, apart, status, word):
    found = system.peer_access("peer access", FakeCuda(count, apart))
    assert found.status == status and word in found.detail


def test_gpus_that_are_hidden_or_have_the_wrong_torch(monkeypatch):
    built = types.SimpleNamespace(cuda=FakeCuda(0), version=types.SimpleNamespace(cuda=None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = system.gpus("GPUs", built, "580.1")
    assert found.status == "broken" and "CPU build" in found.detail and found.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert system.gpus("GPUs", built, "580.1").status == "note"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert system.gpus("GPUs", built, "").status == "note"


def test_every_finding_of_this_machine_has_its_fix():
    """The command line, as a program reads it; it must agree with what the tests themselves could do."""
    done = run_bmburst("doctor", "--json", cwd=Path(), env=os.environ, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["can_train"] else 1)
    assert [f["name"] for f in report["findings"]] == [check.name for check in doctor.CHECKS]
    statuses = {f["name"]: f["status"] for f in report["findings"]}
    assert statuses["torch"] == statuses["Python"] == statuses["numpy"] == statuses["kernel cpu"] == "ok"
    for found in report["findings"]:
        assert "the check itself failed" not in found["detail"], found
        assert bool(found["fix"]) == (found["status"] in ("missing", "broken")), found


def test_json_and_text_say_the_same(capsys):
    checks = (Check("a", fine), Check("b", lacking, needed=True))
    options = argparse.Namespace(report=None, run=None, json=False)
    assert run_doctor(options, checks) == 1
    assert capsys.readouterr().out.rstrip() == to_text(checks, examine(checks))
    options.json = True
    assert run_doctor(options, checks) == 1
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(to_json(checks, examine(checks)))
    assert report["findings"][1] == {
        "name": "b",
        "status": "missing",
        "detail": "gone",
        "fix": "get it",
        "needed": True,
    }


@pytest.mark.parametrize(
    ("capability", "path", "words"),
    [("AVX512", "", "in torch | fp32 | gcc"), ("AVX512", "here", "in torch | compiled by"), ("AVX2", "", "in torch")],
)
def test_the_kernel_of_cpus_names_the_compiler_of_long_tiles(capability, path, words, tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.touch(mode=0o700)
    monkeypatch.setenv("PATH", path and str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = doctor.cpu_flash("kernel cpu", AnotherMachine(cpu=capability))
    assert found.status == "ok" and says(found.detail, words)
    assert ("compiled by" in found.detail) == bool(path) and (capability == "AVX512") == ("tiles" in found.detail)
