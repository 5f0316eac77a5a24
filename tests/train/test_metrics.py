"""metrics.jsonl, evals.jsonl, TensorBoard events, the plot and the progress display."""

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import matplotlib.image
import numpy as np
import pytest

from bmburst.memory import peak_bytes
from bmburst.train.metrics import EvalMetrics, MetricsWriter, StepMetrics, plot_losses, read_lines, smoothed
from bmburst.train.report import ProgressBar
from tests.refusals import refused
from tests.train.run_program import lines

KEYS = ["step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second", "seconds", "memory_gib"]
MORE = ["tokens_per_second_per_gpu", "mfu", "mfu_kernel", "hardware_tflops", "exposed_seconds", "data_seconds"]
MORE += ["reserved_gib", "skipped_steps"]


def step(number, loss=None):
    loss = 1 + 4 / number if loss is None else loss
    return StepMetrics(
        step=number,
        loss=loss,
        bits_per_byte=loss / math.log(2),
        lr=1e-3 / number,
        grad_norm=0.5,
        tokens_per_second=12345.6,
        seconds=0.25,
        memory_gib=1.5,
    )


def evaluation(number, loss=2.0):
    return EvalMetrics(step=number, loss=loss, bits_per_byte=loss / math.log(2), perplexity=math.exp(loss), tokens=4096)


def test_every_step_is_a_line_with_exactly_the_keys_and_is_there_at_once(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        for number in (1, 2):
            writer.write(step(number))
            found = lines(tmp_path / "run")
            assert [line["step"] for line in found] == list(range(1, number + 1))
            assert list(found[-1]) == KEYS + MORE
            assert found[-1]["mfu"] is None
        writer.write_eval(evaluation(2))
        (found,) = lines(tmp_path / "run", "evals.jsonl")
        measured = {"loss": 2.0, "bits_per_byte": 2 / math.log(2), "perplexity": math.exp(2), "tokens": 4096}
        assert [*found.items()] == [("step", 2), *measured.items(), ("data", "held_out")]
    assert len(lines(tmp_path / "run")) == 2
    with MetricsWriter(tmp_path / "run") as writer:  # begins anew
        writer.write(step(1, loss=3.0))
    assert [line["loss"] for line in lines(tmp_path / "run")] == [3.0]


@pytest.mark.parametrize(
    "tail", ["", '{"step": 6, "lo', '{"step": 6}', "\x00\x00"], ids=["whole", "torn", "no line end", "zeros"]
)
def test_resume_drops_later_lines_and_a_torn_one(tmp_path, tail):
    with MetricsWriter(tmp_path) as writer:
        for number in range(1, 6):
            writer.write(step(number))
        writer.write_eval(evaluation(2))
        writer.write_eval(evaluation(4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    with MetricsWriter(tmp_path, first_step=4) as writer:
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
        assert [line["step"] for line in lines(tmp_path, "evals.jsonl")] == [2]
        writer.write(step(4, loss=9.0))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[-1]["loss"] == 9.0
    assert lines(tmp_path)[0]["loss"] == 5.0


def test_a_foreign_file_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("notes\nof mine\n")
    with refused("metrics.jsonl", "line 1", "fix: "):
        MetricsWriter(tmp_path, first_step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == "notes\nof mine\n"


def test_a_diverged_step_is_still_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(1, loss=float("nan")))
        writer.write(step(2, loss=float("inf")))
        writer.write(step(3))
    assert [line["loss"] for line in lines(tmp_path)][:2] == [None, None]
    assert plot_losses(tmp_path) is not None


def test_tensorboard_has_every_number_and_forgets_dropped_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path) as writer:
        for number in range(1, 6):
            writer.write(step(number))
        writer.write_eval(evaluation(5))
    with MetricsWriter(tmp_path, first_step=3) as writer:
        writer.write(step(3, loss=7.0))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {f"train/{key}" for key in KEYS[1:]} <= set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 5.0), (2, 3.0), (3, 7.0)]
    assert [event.step for event in events.Scalars("held_out/perplexity")] in ([], [5])


def test_without_tensorboard_it_says_so_once_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import fails
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(1))
        writer.write(step(2))
    assert capsys.readouterr().err.count("tensorboard is not installed") == 1
    assert len(lines(tmp_path)) == 2


def test_peak_memory_is_in_bytes_and_grows():
    before, reserved = peak_bytes()
    assert 2**23 < before < 2**36 and reserved == 0
    block = np.ones(2**28, dtype=np.uint8)
    assert peak_bytes()[0] >= max(before, block.nbytes)


# Plot


def red(image):
    return int(((image[..., 0] > 0.7) & (image[..., 1] < 0.3) & (image[..., 2] < 0.3)).sum())


def test_plot_shows_the_curves(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for number in range(1, 60):
            writer.write(step(number))
        without = plot_losses(tmp_path)
        blank = matplotlib.image.imread(without)
        writer.write_eval(evaluation(30))
    path = plot_losses(tmp_path)
    assert path == tmp_path / "loss.png"
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 400
    assert picture.shape[1] > 600

    assert red(blank) == 0
    assert red(picture) > 20
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "evals.jsonl",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_plot_of_a_very_short_run(tmp_path, count):
    with MetricsWriter(tmp_path) as writer:
        for number in range(1, count + 1):
            writer.write(step(number))
        writer.write_eval(evaluation(count, loss=6.0))
    path = plot_losses(tmp_path)
    assert path.stat().st_size > 5000
    picture = matplotlib.image.imread(path)
    last = picture[: len(picture) // 2, -picture.shape[1] // 5 :]
    assert count == 1 or red(last) > 20, "the legend hides the evaluation"


def test_nothing_to_plot(tmp_path):
    assert plot_losses(tmp_path) is None and read_lines(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").touch()
    assert read_lines(tmp_path / "metrics.jsonl") == []
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(1, loss=float("nan")))
    assert plot_losses(tmp_path) is None
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_keeps_constants_and_lines_and_has_no_lag():
    assert smoothed([3.0] * 7, 5) == [3.0] * 7
    line = [float(n) for n in range(11)]
    assert smoothed(line, 5) == pytest.approx(line)
    assert smoothed([0, 0, 3, 0, 0], 3) == [0, 1, 1, 1, 0]
    assert smoothed([1.0, 5.0], 1) == [1.0, 5.0]
    assert smoothed([], 3) == []


# Progress


def test_in_a_log_lines_are_plain_and_not_many():
    stream = io.StringIO()
    with ProgressBar(100, stream=stream, interval=3600) as progress:
        for number in range(1, 101):
            progress.update(step(number))
    shown = stream.getvalue().splitlines()
    assert len(shown) == 2, "the first and the last step"
    assert "\r" not in stream.getvalue()
    assert shown[0].startswith("step 1/100  loss 5.0000  7.213 bits/byte  12,346 tokens/s")
    assert shown[0].endswith(" left")
    assert shown[1].startswith("step 100/100")
    assert shown[1].endswith("00:00 left")


def test_time_left_counts_from_where_a_resumed_run_began():
    clock = iter([100.0, 110.0, 120.0])
    stream = io.StringIO()
    progress = ProgressBar(400, first_step=51, stream=stream, interval=0, clock=clock.__next__)
    progress.update(step(51))
    progress.update(step(52))
    first, second = stream.getvalue().splitlines()
    assert first.endswith("58:10 left")
    assert second.endswith("58:00 left")
    clock = iter([0.0, 60.0])
    ProgressBar(101, stream=stream, interval=0, clock=clock.__next__).update(step(1))
    assert stream.getvalue().endswith("1:40:00 left\n")


def test_evaluations_and_notes_stay():
    stream = io.StringIO()
    progress = ProgressBar(10, stream=stream)
    progress.update_eval(evaluation(5))
    progress.note("saved")
    text = "step 5: held-out loss 2.0000 nats/token, 2.885 bits/byte, perplexity 7.39\nsaved\n"
    assert stream.getvalue() == text


PROGRAM = """
import time
from bmburst.train.metrics import StepMetrics
from bmburst.train.report import ProgressBar
with ProgressBar(5, first_step=3) as progress:
    for n in (3, 4, 5):
        time.sleep(0.15)
        progress.update(StepMetrics(step=n, loss=1.25, bits_per_byte=1.5, lr=1e-3, grad_norm=1,
                                    tokens_per_second=1234, seconds=1, memory_gib=1))
        if n == 4:
            with progress.doing("measuring"):
                progress.note("a measurement")
    progress.note("a note")
"""


@pytest.mark.parametrize(("columns", "quality"), [(0, ""), (80, ""), (120, "1.500 bits/byte  ")])
def test_on_a_terminal_there_is_one_bar_on_stderr(columns, quality):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=slave, stdout=subprocess.PIPE, env=environment)
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert done.returncode == 0
    assert done.stdout == b""
    last = [line for line in shown.replace("\n", "\r").split("\r") if line.startswith("step")][-1]
    assert "step 5/5 |" in last
    assert f"loss 1.2500  {quality}1,234 tokens/s" in last
    assert last.rstrip().endswith("00:00 left") and len(last.rstrip()) <= (columns or 79)
    fourth = re.findall(r"step 4/5 \|[^|]*\| (loss|measuring) ", shown)
    assert fourth[0] == fourth[-1] == "loss" and "measuring" in fourth
    assert "step 2/5" in shown
    assert "a note" in shown
