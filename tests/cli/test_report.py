"""The doctor's report: what it says, and that planted secrets are not in it."""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bmburst import __version__
from bmburst.cli import main
from bmburst.config import to_dict, write_json
from bmburst.setup import doctor
from bmburst.train.resolve import resolve
from tests.distributed.started import run_bmburst
from tests.refusals import says

ROOT = Path(__file__).parents[2]
SECRETS = ("alicq7", "patientzz", "confidentialqq", "hfsecretww", "wandbsecretvv", "5551234987", "projectxx", "keyjj")


@pytest.fixture(scope="module")
def findings() -> tuple[doctor.Finding, ...]:
    """What the doctor finds here, once: it starts a process that imports BMTrain."""
    return doctor.examine()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: tuple[doctor.Finding, ...]) -> Path:
    """A home of a user with secrets in names, data and the environment."""
    monkeypatch.setattr(doctor, "examine", lambda _: findings)
    folder = tmp_path / "home-alicq7"
    folder.mkdir()
    for name, value in {
        "HOME": str(folder),
        "USER": "alicq7",
        "LOGNAME": "alicq7",
        "XDG_STATE_HOME": str(folder / "state"),
        "HF_TOKEN": "hfsecretww",
        "WANDB_API_KEY": "wandbsecretvv",
        "BMBURST_API_KEY": "keyjj",
        "NCCL_DEBUG_FILE": str(folder / "log"),
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    return folder


def report(capsys: Any, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["doctor", "--report", *words]) == 0
    assert "bmburst-report.json" in capsys.readouterr().out
    text = Path("bmburst-report.json").read_text()
    for secret in SECRETS:
        assert secret not in text, text
    found: dict[str, Any] = json.loads(text)
    return found


def test_versions_machine_and_options_without_what_is_the_users(home: Path, capsys: Any) -> None:
    found = report(capsys)
    assert found["last_error"] is None and found["run"] is None
    assert found["versions"]["bmburst"] == __version__ and found["versions"]["torch"] == version("torch")
    assert found["checks"]["torch"] == "ok" and found["machine"]["cores"] >= 1
    assert found["environment"]["NCCL_DEBUG"] == "INFO" and found["environment"]["OMP_NUM_THREADS"] == "3"
    assert found["environment"]["NCCL_DEBUG_FILE"] == found["environment"]["BMBURST_API_KEY"] == "(set)"
    assert "HF_TOKEN" not in found["environment"]
    options = {"preset": "llama-tiny", "data.source": str(home / "patientzz.jsonl"), "optimizer.lr": 3e-4}
    (home / "projectxx").mkdir()
    write_json(home / "projectxx" / "config.json", to_dict(resolve((), options)))
    run = report(capsys, "--run", "projectxx")["run"]
    assert run["optimizer.lr"] == 3e-4 and run["data.source"] == "(set)" and run["sequence_length"] > 0
    (home / "mine.json").write_text('{"my": "file"}')
    assert main(["doctor", "--report", "mine.json"]) == main(["doctor", "--report", "--run", "gone"]) == 2
    assert main(["doctor", "--run", "projectxx"]) == 2
    assert (home / "mine.json").read_text() == '{"my": "file"}'


def test_the_last_error_is_told_by_its_code(home: Path, capsys: Any) -> None:
    (home / "patientzz.jsonl").write_text('{"messages": [{"role": "confidentialqq", "content": 5551234987}]}\n')
    words = ("--data", "patientzz.jsonl", "--preset", "llama-tiny", "--steps", "7", "--output", "projectxx")
    assert main(["train", *words, "--nproc", "1"]) == 2
    assert "patientzz" in capsys.readouterr().err
    found = report(capsys)["last_error"]
    assert found["command"] == "train"
    assert found["options"] == {
        **{"--data": "(set)", "--preset": "llama-tiny", "--steps": "7", "--output": "(set)", "--nproc": "1"}
    }
    assert found["errors"][0]["type"] == "bmburst.errors.UserError"
    assert any("bmburst/data/" in frame for each in found["errors"] for frame in each["raised"]), found
    assert oct((home / "state" / "bmburst" / "last_error.json").stat().st_mode)[-3:] == "600"
    # A text that is a number stays the user's; a message has the words of the code.
    assert main(["generate", "--checkpoint", "alicq7", "--prompt", "5551234987", "--seed", "12"]) == 2
    found = report(capsys)["last_error"]
    assert found["options"] == {"--checkpoint": "(set)", "--prompt": "(set)", "--seed": "12"}
    says(found["errors"][0]["message"], "no directory <value> | fix: give a directory")
    assert main(["train", "--passwordalicq7", "keyjj"]) == 2
    assert "unknown option '<value>'" in report(capsys)["last_error"]["errors"][0]["message"]


def test_errors_of_ranks_and_of_the_users_own_files(home: Path, capsys: Any) -> None:
    (home / "projectxx.py").write_text(
        "class alicq7(Exception): pass\ndef patientzz():\n    raise alicq7('confidentialqq')\npatientzz()\n"
    )
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = run_bmburst("launch", "--nproc", 2, "--", "projectxx.py", cwd=home, env=env, timeout=120)
    assert done.returncode == 1 and "confidentialqq" in done.stderr
    found = report(capsys)["last_error"]
    assert found["command"] == "launch" and found["options"] == {"--nproc": "2"}
    (error,) = found["errors"]
    assert error["type"] == "an exception of another program"
    assert error["raised"][-1] == "in a file of another program"


def test_nothing_is_kept_where_nothing_can_be_written(home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    assert main(["train", "--steps", "x"]) == 2
    says(capsys.readouterr().err, "steps | 'x'")
    assert report(capsys)["last_error"] is None
