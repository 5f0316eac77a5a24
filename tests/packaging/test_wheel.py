"""The wheel holds the packages and nothing else, and does the main job where nothing else of the clone is."""

import json
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.wheel import PACKAGES, ROOT, Environment, build_wheel, requirements


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_files_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        facts = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
        scripts = archive.read(f"{information}/entry_points.txt").decode()
    held = {name for name in names if not name.startswith(f"{information}/")}
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == sources
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert "bmburst/schedule/machines/h200.toml" in held
    assert "model_center_ext/configs/llama-3-8b.json" in held
    assert any(name.endswith("/LICENSE") for name in names)
    assert "bmburst = bmburst.cli:main" in scripts
    named = {wanted.name for wanted in requirements(facts.get_all("Requires-Dist", []))}
    assert "torch" in named and not named & {"bmtrain", "model-center"}  # BMTrain's NCCL would break torch's
    assert facts["Requires-Python"] == ">=3.11"


@pytest.mark.long
def test_the_wheel_does_the_main_job_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        facts = Parser().parsestr(archive.read(name).decode())
    environment = Environment(tmp_path)
    environment.link([wanted.name for wanted in requirements(facts.get_all("Requires-Dist", []))])
    environment.link(["pip", "setuptools"])
    environment.install(wheel)
    environment.link(["bmtrain"])  # as pip install --no-deps does

    where = "import bmburst, bmburst_ops, model_center_ext, sys; print(bmburst.__file__); print(*sys.path, sep='\\n')"
    paths = environment.run("python", "-c", where).splitlines()
    assert Path(paths[0]).is_relative_to(environment.site)
    assert not [path for path in paths if path and (Path(path) == ROOT or (Path(path) / "tests").is_dir())]

    report = json.loads(environment.run("bmburst", "doctor", "--json"))
    assert report["can_train"]
    short = ("--steps", 4, "--sequence-length", 512, "--eval-every", 4, "--eval-sequences", 1, "--sample-tokens", 8)
    printed = environment.run("bmburst", "train", "--nproc", 2, *short, "--checkpoint-every", 4, "--output", "run")
    assert "Traceback" not in printed
    run = environment.folder / "home" / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (run / "loss.png").is_file() and (run / "sample.txt").is_file()
    made = environment.run(
        "bmburst", "generate", "--checkpoint", "run", "--prompt", "import ", "--max-new-tokens", 4, "--nproc", 2
    )
    assert "Traceback" not in made
    plan = environment.run("bmburst", "plan", "--preset", "llama-3-8b", "--sequence-length", "128K", "--nproc", 8)
    assert "bmburst train" in plan
