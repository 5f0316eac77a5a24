"""What the build of BMTrain asks of its tools, without building: the wrapper, the environment, the refusals."""

import io
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bmburst.cli import main
from bmburst.errors import UserError
from bmburst.setup import build_bmtrain
from bmburst.setup.build_bmtrain import (
    BuildSpec,
    Machine,
    Toolchain,
    build_environment,
    build_wheel,
    check_toolchain,
    join_commands,
    list_missing,
    parse_architecture,
)
from bmburst.setup.nvcc import replace_architectures, write_wrapper
from tests.pairs import long
from tests.setup.fatbin import fat_binary


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["-c", "a.cu", "-gencode=arch=compute_61,code=sm_61", "-O3"], ["-c", "a.cu", "-O3", 90, 100]),
        (["--generate-code=arch=compute_75,code=[compute_75,sm_75]", "x.cu"], ["x.cu", 90, 100]),
        (["-gencode", "arch=compute_80,code=sm_80", "-x", "cu"], ["-x", "cu", 90, 100]),
        (["--generate-code", "a", "--generate-code", "b", "c"], ["c", 90, 100]),
        (["--version"], ["--version"]),
        (["-v", "-gencoder", "a b"], ["-v", "-gencoder", "a b"]),
    ],
)
def test_architectures_are_replaced_and_nothing_else(before, after):
    expected = [f"-gencode=arch=compute_{w},code=sm_{w}" if isinstance(w, int) else w for w in after]
    assert replace_architectures(before, (90, 100)) == expected


def test_the_wrapper_becomes_nvcc_and_keeps_its_words_whole(tmp_path):
    real = tmp_path / "the real nvcc"
    real.write_text('#!/bin/sh\nfor word in "$@"; do echo "<$word>"; done\nexit 7\n')
    real.chmod(0o755)
    wrapper = write_wrapper(tmp_path, real, (80, 90))
    words = ["-Xcompiler", "-fPIC -O2", "", "-gencode=arch=compute_61,code=sm_61"]
    done = subprocess.run([wrapper, *words], capture_output=True, text=True, check=False)
    expected = ["-Xcompiler", "-fPIC -O2", ""] + [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90)]
    assert done.stdout.splitlines() == [f"<{word}>" for word in expected]
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("9.0", 90), ("sm_100", 100), ("12.0", 120), ("compute_75", 75)]
)
def test_architectures_in_every_spelling(text, value):
    assert parse_architecture(text) == value


@pytest.mark.parametrize("text", ["h100", "", "9", "sm_90a", "-90", "1000"])
def test_what_is_no_architecture_is_refused(text):
    with pytest.raises(UserError, match="allowed"):
        parse_architecture(text)


def test_the_environment_of_the_build(tmp_path):
    tools = Toolchain(nvcc=Path("/cuda/bin/nvcc"), nccl=tmp_path)
    own = {"LDFLAGS": "-s", "NCCL_ROOT_DIR": "/old", "HOME": "/h", "CUDACXX": "/cuda/bin/nvcc", "PATH": "/bin"}
    made = build_environment(own, tools, Path("/w/nvcc"), portable=True)
    assert made["CUDACXX"] == "/w/nvcc" and made["HOME"] == "/h"
    assert "NCCL_ROOT_DIR" not in made, "CMake would prefer it to the folder that was checked"
    assert (made["NCCL_INCLUDE_DIR"], made["NCCL_LIB_DIR"]) == (f"{tmp_path}/include", f"{tmp_path}/lib")
    assert made["LDFLAGS"] == r"-s -Wl,-rpath,\$ORIGIN/../nvidia/nccl/lib"
    assert made["BUILD_DOCKER_ENV"] == "1"
    assert build_environment(own, tools, Path("/w"), portable=False)["BUILD_DOCKER_ENV"] == "0"
    assert made["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.fixture
def no_tools(monkeypatch, tmp_path):
    """A machine with Python and nothing else."""
    monkeypatch.delenv("CXX", raising=False)
    return Machine(nvcc=None, nccl=None, include=tmp_path, which=lambda _: None, has_module=lambda _: False)


def test_everything_missing_is_named_at_once_with_its_command(no_tools, tmp_path):
    missing = {tool.split()[0]: command for tool, command in list_missing(no_tools).items()}
    assert set(missing) >= {"nvcc", "cmake", "a", "Python.h", "pip", "setuptools", "wheel", "pybind11", "nccl.h"}
    assert "--no-deps nvidia-nccl-cu13" in missing["nccl.h"], "with its dependencies it could replace torch's"
    with pytest.raises(UserError) as refused:
        check_toolchain(BuildSpec(architectures=(90,), output=tmp_path), no_tools)
    lines = str(refused.value).splitlines()
    assert len(lines) <= 3 and "nvcc" in lines[0] and "pybind11" in lines[1] and "apt-get install -y" in lines[1]


def test_the_command_line_says_what_is_missing_with_status_2(no_tools, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("BMBURST_LAUNCH_FOLDER", raising=False)
    monkeypatch.setattr(Machine, "here", lambda: no_tools)
    assert main(["build-bmtrain", "--arch", "90", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("bmburst build-bmtrain: missing: nvcc")
    assert not (tmp_path / "out").exists()


def test_commands_of_one_installer_are_joined():
    pip = f"{sys.executable} -m pip install"
    commands = [
        f"{pip} a b",
        "apt-get install -y g++",
        f"{pip} --no-deps n",
        f"{pip} c",
        "apt-get install -y x",
        "run me",
    ]
    expected = [f"{pip} a b c", "apt-get install -y g++ x", f"{pip} --no-deps n", "run me"]
    assert join_commands(commands) == expected


@pytest.fixture
def whole(monkeypatch, tmp_path):
    """A machine with an nvcc that knows sm_80 and sm_90, which the user names, and everything else in place."""
    nvcc = tmp_path / "cuda" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho sm_80; echo sm_90; echo release 13.0, V13.0.1; echo cmake version 4.0\n")
    nvcc.chmod(0o755)
    nccl = tmp_path / "nccl"
    for name in ("include/nccl.h", "include/Python.h", "lib/libnccl.so.2"):
        (nccl / name).parent.mkdir(parents=True, exist_ok=True)
        (nccl / name).touch()
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.setenv("NCCL_INCLUDE_DIR", str(nccl / "include"))
    monkeypatch.setenv("NCCL_LIB_DIR", str(nccl / "lib"))
    there = {"which": lambda _: str(nvcc), "has_module": lambda _: True}
    return replace(Machine.here(), include=nccl / "include", **there)


@pytest.fixture
def fake_tools(whole, tmp_path):
    return Toolchain(nvcc=(tmp_path / "cuda" / "nvcc").resolve(), nccl=tmp_path / "nccl")


def test_the_users_own_tools_are_used(whole, fake_tools, tmp_path):
    assert check_toolchain(BuildSpec(architectures=(90,), output=tmp_path), whole) == fake_tools
    assert build_bmtrain.cuda_major(fake_tools.nvcc) == 13


def test_an_architecture_that_nvcc_does_not_know_is_refused(whole, tmp_path):
    with pytest.raises(UserError, match=r"(?s)sm_61.*allowed: 80 90"):
        check_toolchain(BuildSpec(architectures=(61, 90), output=tmp_path), whole)


@pytest.mark.parametrize("name", ["none.tar.gz", "bmtrain.whl"])
def test_what_is_no_source_package_is_refused(whole, name, tmp_path):
    (tmp_path / "bmtrain.whl").touch()
    with pytest.raises(UserError, match="pip download"):
        check_toolchain(BuildSpec(architectures=(90,), output=tmp_path, sdist=tmp_path / name), whole)


def source_package(folder, script):
    """A source package whose setup.py runs `script` where BMTrain's would compile."""
    path = folder / "bmtrain-1.0.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {
            "setup.py": script,
            "PKG-INFO": "Metadata-Version: 2.1\nName: bmtrain\nVersion: 1.0.1\n",
        }.items():
            info = tarfile.TarInfo(f"bmtrain-1.0.1/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


FAKE_SETUP = """
import os, pathlib
from setuptools import setup
from setuptools.dist import Distribution
class Compiled(Distribution):
    def has_ext_modules(self): return True
for name in ("BUILD_DOCKER_ENV", "CUDACXX", "NCCL_LIB_DIR"): print("SEES", name, os.environ[name])
assert not os.environ["CUDACXX"].startswith(os.path.dirname(os.environ["NCCL_LIB_DIR"]))
pathlib.Path("bmtrain").mkdir(exist_ok=True)
pathlib.Path("bmtrain/__init__.py").touch()
pathlib.Path("bmtrain/C%s").write_bytes(bytes.fromhex("%s"))
setup(name="bmtrain", version="1.0.1", packages=["bmtrain"], package_data={"bmtrain": ["*.so"]}, distclass=Compiled)
"""


@pytest.mark.parametrize(
    ("compiled", "refusal"), [((80, 90), None), ((90,), "holds sm_90"), *long(((), "holds no GPU code"))]
)
def test_a_wheel_is_taken_only_with_the_machine_code_asked_for(compiled, refusal, fake_tools, tmp_path):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    binary = b"\x7fELF" + b"".join(fat_binary((2, sm)) for sm in compiled)
    sdist = source_package(tmp_path, FAKE_SETUP % (suffix, binary.hex()))
    spec = BuildSpec(architectures=(80, 90), output=tmp_path / "out" / "deep", sdist=sdist, portable=True)
    if refusal:
        with pytest.raises(RuntimeError, match=refusal):
            build_wheel(spec, fake_tools)
        assert not list(spec.output.glob("*.whl"))
    else:
        wheel = build_wheel(spec, fake_tools)
        assert wheel.parent == spec.output
        assert f"bmtrain/C{suffix}" in zipfile.ZipFile(wheel).namelist()
    log = (spec.output / "build-bmtrain.log").read_text()
    assert "SEES BUILD_DOCKER_ENV 1" in log and f"SEES NCCL_LIB_DIR {fake_tools.nccl}/lib" in log


def test_a_failed_build_shows_the_end_of_its_log(fake_tools, tmp_path):
    sdist = source_package(tmp_path, "raise SystemExit('nvcc fatal: out of luck')\n")
    with pytest.raises(RuntimeError, match=r"(?s)build-bmtrain\.log.*out of luck"):
        build_wheel(BuildSpec(architectures=(90,), output=tmp_path, sdist=sdist), fake_tools)


def test_without_a_gpu_an_architecture_must_be_given(capsys, monkeypatch, no_cuda):
    monkeypatch.delenv("BMBURST_LAUNCH_FOLDER", raising=False)
    assert main(["build-bmtrain"]) == 2
    assert "--arch" in capsys.readouterr().err
