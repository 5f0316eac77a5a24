"""The timer of a rank: who starts it anew, what it writes, and that other processes leave it alone."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.distributed.started import run_python

ROOT = Path(__file__).parents[2]


def run(tmp_path, text):
    """Run a script that begins with the watchdog armed for `folder`; returns the finished process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, faulthandler, os, signal, subprocess, sys, threading, time\n"
        "from pathlib import Path\n"
        "from bmburst.launch import watchdog\n"
        f"folder = Path({str(tmp_path)!r})\n" + textwrap.dedent(text)
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("BMBURST")}
    return run_python(str(script), cwd=tmp_path, env=environ | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("text", "status", "file", "words"),
    [
        ("def here(): time.sleep(60)\nwatchdog.arm(0.3, folder, 5)\nhere()", 1, "hang.5", ["script.py", "in here"]),
        # PyDLL keeps the global lock during the call, as BMTrain's bindings do: no Python thread could run now.
        ("watchdog.arm(0.3, folder, 0)\nctypes.PyDLL(None).sleep(60)", 1, "hang.0", ["script.py"]),
        ("watchdog.arm(1.0, folder, 0)\nfor _ in range(15): time.sleep(0.1), watchdog.beat()", 0, "hang.0", []),
        (
            "def waiting(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
            "watchdog.arm(30, folder, 3)\nwaiting()",
            -signal.SIGTERM,
            "stood.3",
            ["in waiting"],
        ),
    ],
    ids=["where it stands", "the global lock", "beats hold it off", "SIGTERM"],
)
def test_it_fires_and_says_where_the_process_stood(tmp_path, text, status, file, words):
    assert run(tmp_path, text).returncode == status
    said = (tmp_path / file).read_text()
    assert all(word in said for word in words) and bool(said) == bool(words)


def test_zero_arms_nothing(tmp_path):
    text = """
        armed = []
        faulthandler.dump_traceback_later = lambda *a, **k: armed.append(a)
        watchdog.arm(0, folder, 0)
        watchdog.beat()
        print(armed)
        """
    assert run(tmp_path, text).stdout == "[]\n"


def test_a_child_process_leaves_the_parents_file_alone(tmp_path):
    # It inherits the variable but not the file: writing to that number would hit a file of its own.
    text = """
        watchdog.arm(30, folder, 0)
        code = "import faulthandler; armed = [];" \\
               "faulthandler.dump_traceback_later = lambda *a, **k: armed.append(a);" \\
               "from bmburst.launch.watchdog import beat; beat(); print(armed)"
        subprocess.run([sys.executable, "-c", code], check=True)
        if os.fork() == 0:
            faulthandler.dump_traceback_later = lambda *a, **k: print("armed in a fork", flush=True)
            watchdog.beat()
            os._exit(0)
        os.wait()
        """
    done = run(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("is_polite", [True, False])
def test_a_sigterm_leaves_other_threads_alone(tmp_path, is_polite):
    """They run on while a stack is written: reading theirs could crash the process."""
    text = f"""
        signal.signal(signal.SIGTERM, lambda *_: None)
        watchdog.arm(60, folder, 0)
        def elsewhere(): time.sleep(60)
        threading.Thread(target=elsewhere, daemon=True).start()
        with watchdog.handle_signals([signal.SIGTERM] * {is_polite}, lambda *_: None):
            os.kill(os.getpid(), signal.SIGTERM)
        """
    assert run(tmp_path, text).returncode == 0
    said = (tmp_path / "stood.0").read_text()
    assert "script.py" in said and "elsewhere" not in said


def test_a_sigterm_while_the_handler_changes_is_written_down(tmp_path):
    # The launcher takes a rank for one that waits for a lost one only if it is.
    text = """
        os.environ |= {"BMBURST_LAUNCH_FOLDER": str(folder), "LOCAL_RANK": "3"}
        change, asked = signal.signal, []
        def interrupted(signum, handler):
            before = change(signum, handler)
            signal.pthread_kill(threading.get_ident(), signum)  # the timer's thread could take one to the process
            return before
        watchdog.arm(30, folder, 3)
        signal.signal = interrupted
        with watchdog.handle_signals([signal.SIGTERM], lambda signum, frame: asked.append(signum)):
            print(len(asked))
            signal.signal = change
        """
    done = run(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "in handle_signals" in (tmp_path / "stood.3").read_text()


@pytest.mark.parametrize("imported", ["", "import torch"], ids=["before-torch", "after-torch"])
def test_every_optimizer_step_is_a_beat(tmp_path, imported):
    # The launcher's ranks load the file by its path; so does this test.
    text = f"""
        import importlib.util
        {imported}
        spec = importlib.util.spec_from_file_location("_watchdog", {str(ROOT / "bmburst/launch/watchdog.py")!r})
        watchdog = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(watchdog)
        assert ("torch" in sys.modules) == bool({imported!r})
        watchdog.arm(60, folder, 0)
        watchdog.beat_with_optimizers()
        import torch
        beats = []
        faulthandler.dump_traceback_later = lambda *a, **k: beats.append(a)
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        sgd, adam = torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight])
        for optimizer in (sgd, adam, sgd):
            optimizer.step()
        print(len(beats))
        """
    script = tmp_path / "bare.py"
    head = f"import faulthandler, sys\nfrom pathlib import Path\nfolder = Path({str(tmp_path)!r})\n"
    script.write_text(head + textwrap.dedent(text))
    if imported:
        done = run_python(str(script), cwd=tmp_path, env=os.environ)
    else:
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "3\n", done.stderr


def test_bmtrains_optimizers_beat_too(tmp_path):
    text = """
        import bmburst
        bmburst.start()
        import bmtrain as bmt, torch
        watchdog.arm(60, folder, 0)
        watchdog.beat_with_optimizers()
        beats = []
        faulthandler.dump_traceback_later = lambda *a, **k: beats.append(a)
        for kind in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer):
            weight = bmt.DistributedParameter(torch.ones(6))
            manager = bmt.optim.OptimManager()
            manager.add_optimizer(kind([weight], lr=0.1))
            manager.zero_grad()
            manager.backward(weight.gather().sum())
            manager.step()
            print(len(beats))
        """
    done = run(tmp_path, text)
    assert done.stdout == "1\n2\n", done.stderr
