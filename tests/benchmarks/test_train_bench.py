"""`bmburst bench train`: cells, arithmetic, tables, a lost run, and all methods on two ranks of the CPU."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.attention.method import Setting
from benchmarks.engine import job as job_module
from benchmarks.engine.job import Job
from benchmarks.engine.kinds import FAILED, OK, REFUSED, Results
from benchmarks.engine.report import markdown, row_line
from benchmarks.training.cells import METHODS, Rates, TrainCell, TrainSelection, bound, flops, list_cells, utilisation
from benchmarks.training.kind import KIND, draw
from benchmarks.training.report import furthest, running_median, shown_steps, to_all_layers
from bmburst.cli import main
from bmburst.train.config import DataConfig
from tests.benchmarks.made import HEADER
from tests.benchmarks.made import results as made_results
from tests.refusals import says

results = partial(made_results, KIND)
RATES = Rates(attention=600e12, matmul=700e12)


def cell(method="ours", tokens=131072, layers=2, **changes):
    values = {"suite": "step", "preset": "llama-3-8b", "ranks": 4, "device": "cuda"}
    return TrainCell(method=method, tokens=tokens, layers=layers, **{**values, **changes})


def selection(**changes):
    return TrainSelection(**{"ranks": (4,), "device": "cuda", "methods": tuple(METHODS), **changes})


def measured(at, seconds=1.0, ratio=1.1, peak=50.0, loss=11.8):
    times = {"median": seconds * 1e3, "least": seconds * 1e3, "most": seconds * 1e3, "count": 3}
    return {
        "status": OK,
        "seconds": 4 * seconds,
        "milliseconds": times,
        "bound": {"attention": seconds / ratio / 2, "matmul": seconds / ratio / 2, "total": seconds / ratio},
        "ratio": ratio,
        "tokens_per_second": at.tokens / seconds / at.ranks,
        "mfu": 0.5,
        "mfu_kernel": 0.55,
        "peak_memory_gib": peak,
        "allocated_gib": peak - 1,
        "planned": {"milliseconds": seconds * 1e3, "allocated_gib": peak},
        "rates": {"attention": [600.0, 610.0], "matmul": [700.0, 690.0]},
        "losses": [loss, loss / 2, loss / 4],
        "grad_norms": [3.0, 2.0, 1.0],
    }


# Cells


def test_names_say_model_length_and_method():
    listed = list_cells(selection(ranks=(1, 4), layers=(2, 32), tokens=(32768,)))
    keys = [at.key for at in listed]
    assert "step/llama-3-8b-x2/32768/ours@4" in keys and "step/llama-3-8b/32768/tensor-v1@4" in keys
    assert "loss/tiny-8-heads/32768/ours@1-float32" in keys and "loss/tiny-8-heads/32768/ulysses@4" in keys
    assert len(keys) == len(set(keys))
    assert {at.method for at in listed if at.ranks == 1} == {"ours"}
    assert {at.method for at in listed if at.suite == "loss" and at.ranks == 4} == set(METHODS)
    assert cell(device="cpu", dtype="float32", recompute="block").key.endswith("ours@4-cpu-float32-block")
    assert [at.tokens for at in list_cells(selection(globs=("step/llama-3-8b/*/ours",)))] == sorted(
        1024 * n for n in (32, 128, 256, 512, 1024, 2048)
    )


def test_batches_and_stages_of_zero_are_of_the_suite_step():
    listed = list_cells(selection(batches=(1, 8), stages=(3, 2), tokens=(4096,), layers=(2,)))
    keys = [at.key for at in listed]
    assert len(keys) == len(set(keys))
    assert "step/llama-3-8b-x2/8x4096/ours@4-zero2" in keys and "step/llama-3-8b-x2/4096/ours@4" in keys
    assert all(at.batch == 1 and at.zero == 3 for at in listed if at.suite != "step")
    one, eight = cell(tokens=4096), cell(tokens=4096, batch=8, zero=2)
    assert flops(eight) == pytest.approx(8 * flops(one))
    assert bound(eight, RATES).total == pytest.approx(8 * bound(one, RATES).total)
    parallel = METHODS["ours"].parallel(eight)
    assert parallel.zero_level == 2 and METHODS["ours"].predict(eight, "h200").candidate.zero == 2
    # whole weights of four layers in place of two; eight sequences' activations
    three, two = (METHODS["ours"].predict(cell(tokens=4096, batch=8, layers=4, zero=n), "h200") for n in (3, 2))
    assert two.memory.total > three.memory.total
    assert three.memory.total > METHODS["ours"].predict(one, "h200").memory.total


def test_a_method_that_stores_scores_is_tried_whatever_the_planner_says():
    at = cell("ring-li", tokens=1 << 20, ranks=16)
    assert METHODS["ring-li"].refusal(at) is None  # 8 KV heads are not dealt out
    assert METHODS["ring-li"].memory_refusal(at, "h200", 1.0) is None
    assert list(METHODS)[-1] == "ring-li"  # it may end out of memory


@pytest.mark.parametrize(
    ("method", "spread"),
    [("ulysses", (1, 4, "none")), ("zigzag-ring-nccl", (1, 1, "ring")), ("tensor-v3", (4, 1, "none"))],
)
def test_a_prediction_is_of_the_method(method, spread):
    at = cell(method=method, preset="llama-3-70b", tokens=1 << 14, ranks=4)  # where ours would gather
    way = METHODS[method].predict(at, "h200").candidate
    assert (way.tensor, way.ulysses_degree, way.outer) == spread
    assert way.transport == "nccl" and (way.outer != "ring" or way.ring_tensors == "kv")


def test_methods_say_why_they_cannot():
    says(METHODS["ulysses"].refusal(cell(ranks=16, tokens=1 << 20)), "8 KV heads", "16 ranks")
    assert METHODS["zigzag-ring-nccl"].refusal(cell(ranks=16)) is None and METHODS["ours"].refusal(cell()) is None
    says(METHODS["tensor-v3"].refusal(cell(ranks=3)), "tensor 3", "32 query heads")
    room = 139.8 * 2**30
    some, all_ = (cell(layers=2, recompute=f"block+first-{n}") for n in (1, 2))
    assert METHODS["ours"].refusal(some) is None and METHODS["ours"].predict(some, "h200").candidate.recompute
    says(METHODS["ours"].refusal(all_), "'block+first-2'", "2 layers")
    assert METHODS["ours"].predict(all_, "h200") is None
    assert METHODS["ours"].memory_refusal(cell(layers=32), "h200", room) is None
    assert "would not fit: about" in METHODS["tensor-v1"].memory_refusal(cell(tokens=1 << 20, layers=32), "h200", room)
    assert METHODS["tensor-v1"].memory_refusal(cell(tokens=1 << 20, layers=32), None, room) is None


# Arithmetic


def test_the_bound_is_that_of_hand_numbers():
    at = cell(tokens=1 << 20, layers=1)
    # 3.5 times 4 S^2 H D / 2, and 6 a weight: q, k, v, o, three of the MLP, head, and norms.
    attention = 3.5 * 2 * (1 << 40) * 32 * 128
    block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
    products = 6 * (block + 128256 * 4096 + 4096) * (1 << 20)
    found = bound(at, RATES)
    assert found.attention == pytest.approx(attention / 600e12 / 4) and 13.1 < found.attention < 13.2
    assert found.matmul == pytest.approx(products / 700e12 / 4) and found.total == found.attention + found.matmul


def test_utilisation_counts_attentions_backward_twice_or_two_and_a_half_times():
    at = cell(tokens=1 << 20, layers=1)
    forward = 2 * (1 << 40) * 32 * 128
    assert flops(at, attention_backward=2.5) - flops(at) == pytest.approx(forward / 2)
    assert utilisation(at, 10.0, 1e15, attention_backward=2.0) == pytest.approx(flops(at) / 10 / 4 / 1e15)


def test_all_layers_lie_on_the_line_through_two_numbers():
    assert to_all_layers({2: 5.0, 4: 9.0}, 32) == pytest.approx(65.0)
    assert to_all_layers({1: 1.0, 2: 2.0, 3: 3.0}, 10) == pytest.approx(10.0)
    assert to_all_layers({2: 5.0}, 32) is None


def test_estimates_come_from_like_cells_and_before_them_from_the_planner():
    made = results((cell("ulysses"), measured(cell(), seconds=3.0)))
    assert KIND.estimate(made, cell("ours")) == 12.0
    assert KIND.estimate(made, cell(tokens=1 << 20)) > 10 + 4 * bound(cell(tokens=1 << 20), RATES).total
    assert KIND.estimate(Results(KIND), cell()) == 0.0


# Tables and pictures


def shown():
    rows = []
    for layers in (2, 4):
        for method in ("ours", "ulysses"):
            for tokens in (32768, 131072):
                for ranks in (2, 4):
                    at = cell(method, tokens, layers, ranks=ranks)
                    rows.append((at, measured(at, seconds=(1 + layers) / ranks, peak=10.0 + layers)))
    rows.append((cell("tensor-v1", layers=4), {"status": REFUSED, "reason": "would not fit"}))
    for ranks, loss in ((1, 5.0), (4, 5.1)):
        at = cell(suite="loss", ranks=ranks, tokens=2048)
        rows.append((at, measured(at, loss=loss)))
    at = cell(suite="curve", preset="llama-95m", layers=8)
    rows.append((at, measured(at)))
    return results(*rows)


def test_tables_show_times_bounds_speeds_memory_and_what_is_derived():
    made = shown()
    chosen = {"heads": 4, "outer": "none", "travellers": "kv"}
    made.rows[cell().key] |= {"strategy": chosen, "transport": "peer", "recompute": "block"}
    text = markdown(made)
    assert "ours: 128K heads x4 by peer, block." in text
    assert "## Training step over sequence length: llama-3-8b, 2 of 32 layers, 4 GPUs, bfloat16" in text
    assert "| ours | 0.750 / 0.682 / 1.100 | 0.750 / 0.682 / 1.100 |" in text
    assert "| ours | 10923 / 50.0% / 55.0% | 43691 / 50.0% / 55.0% |" in text
    assert "| ours | 12.0 (11.0) / 12.0 |" in text
    assert "## Derived, not measured: llama-3-8b with all 32 layers, 4 GPUs, bfloat16" in text
    # (1 + 32) / 4 s, 131072 / 4 tokens a GPU, 10 + 32 GiB
    least = bound(cell(layers=32), Rates(attention=605e12, matmul=695e12)).total
    assert f"| ours | 128K | 2, 4 | 8.250 | {least:.3f} | {8.25 / least:.3f} | 3972 | 42.0 |" in text
    assert "## Training step over GPUs: llama-3-8b, 2 of 32 layers, 128K tokens, bfloat16" in text
    assert "| tensor-v1 |  | - [1] |" in text and "1. refused: would not fit" in text
    assert "| ours, 4 GPUs | 5.10000 | 1.27500 | 2.0e-02 | 0.0e+00 |" in text
    assert "TFLOP/s: attention 600 to 610, matmul 690 to 700" in text
    assert "1.100 of the bound, 43691 tokens/s/GPU" in row_line(made, cell())
    assert shown_steps(50) == [1, 6, 12, 17, 23, 28, 34, 39, 45, 50] and shown_steps(2) == [1, 2]


def test_tables_over_the_batch_are_apart_from_those_over_the_length():
    rows = [(at := cell(tokens=4096, batch=n), measured(at, seconds=n)) for n in (1, 4)]
    at = cell(tokens=4096, zero=2)
    text = markdown(results(*rows, (at, measured(at, peak=77.0))))
    assert "## Training step over batch size: llama-3-8b, 2 of 32 layers, 4K tokens, 4 GPUs, bfloat16\n" in text
    assert "| peak GiB a GPU / by the planner, torch's alone | 1 | 4 |" in text
    assert text.count("## Training step over sequence length") == 2 and ", bfloat16, ZeRO-2\n" in text
    over_length = text.split("## Training step over batch size")[0]
    assert "| ours | 77.0 (76.0) / 77.0 |" in over_length and "4.000 /" not in over_length


def test_layers_are_not_derived_where_all_were_measured():
    at = cell(layers=32)
    assert "Derived" not in markdown(results((cell(), measured(cell())), (at, measured(at, seconds=9.0))))


def test_pictures_are_drawn_of_every_comparison(tmp_path):
    made = shown()
    made.rows = {key: row for key, row in made.rows.items() if "x4" not in key and "32768" not in key}
    paths = draw(made, tmp_path / "r")
    assert {path.name for path in paths} == {
        *(f"r-tokens-llama-3-8b-x2-{n}-{end}.png" for n in (2, 4) for end in ("seconds", "ratio", "speed", "memory")),
        *(f"r-gpus-llama-3-8b-x2-128K-{end}.png" for end in ("total", "speed", "memory")),
        "r-loss-llama-3-8b-x2.png",
        "r-loss-llama-3-8b-x2-difference.png",
        "r-curve-llama-95m.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_curve_is_smoothed_by_the_median_of_the_steps_around():
    falling = [10.0 - step for step in range(9)]
    assert running_median([*falling[:4], 50.0, *falling[5:]])[4] == 7.0  # between 2, 3, 4, 5 and 8, 9, 10, 50
    assert running_median([3.0, 9.0, 4.0]) == [4.0, 4.0, 4.0]
    assert running_median([]) == []


# Runs


def test_a_killed_run_goes_on_with_what_is_left(tmp_path):
    cells = tuple(cell(method) for method in ("ours", "ulysses", "zigzag-ring-nccl"))
    output = tmp_path / "r.json"
    job = Job(kind="train", ranks=4, cells=cells, output=str(output))
    killed = results((cells[0], measured(cells[0])))
    killed.running = cells[1].key
    killed.write(output)
    starts = []

    def started(spec, command):
        own = Job.read(Path(command[-1]))
        starts.append(spec.nproc)
        assert own == job
        made = Results.read(KIND, output)
        todo = [at for at in own.cells if not made.is_done(at, again=own.again)]
        if len(starts) == 1:
            assert todo == [*cells[1:]] and made.running is None
            made.running = todo[0].key  # it is lost again
        else:
            assert todo == [cells[2]]
            made.put(todo[0], measured(todo[0]))
        made.write(output)
        return 1 if len(starts) == 1 else 0

    assert job_module.run_job(job, header=HEADER, cell_timeout=1, starter=started) == 0
    found = Results.read(KIND, output)
    assert [found.rows[at.key]["status"] for at in cells] == [OK, FAILED, OK] and starts == [4, 4]
    assert job_module.run_job(replace(job, cells=cells[:1]), header=HEADER, cell_timeout=1, starter=started) == 0
    assert starts == [4, 4]  # nothing is left: nothing is started


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_the_kernel_under_test_is_the_trainers_too(kernel, tmp_path):
    from benchmarks.training.measure import build_trainer

    setting = Setting(group=None, kernel=None, kernel_name=kernel)
    config = build_trainer(cell("ours"), setting, DataConfig(), tmp_path, steps=1, make=lambda config: config)
    assert config.parallel.kernel == kernel


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run on two ranks: every method's losses, one rank's, and two steps."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}, and its cube {n**3}.\n" for n in range(400)))
    words = ["--ranks", "2", "--preset", "llama-tiny", "--layers", "1", "--tokens", "60", "--dtype", "float32"]
    words += ["--text", str(folder / "text.txt"), "--steps", "3", "--repeats", "2"]
    words += ["--cells", "loss/*,step/*/ours,step/*/tensor-v1", "--output", str(folder / "r.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert main(["bench", "train", *words]) == 0
    return folder / "r.json", words


@pytest.mark.long
def test_every_method_trains_to_the_losses_of_one_rank(run):
    rows = json.loads(run[0].read_text())["rows"]
    losses = {key: row for key, row in rows.items() if key.startswith("loss/")}
    assert len(losses) == 1 + len(METHODS) and all(row["status"] == OK for row in losses.values()), rows
    one = losses["loss/llama-tiny-x1/60/ours@1-cpu-float32"]
    assert len(one["losses"]) == 3 and one["losses"][-1] < one["losses"][0]
    for key, row in losses.items():
        # Adam hides a gradient's scale from the losses, but not from its norm.
        assert furthest(row, one) < 2e-6 and furthest(row, one, "grad_norms") < 2e-5, key


@pytest.mark.long
def test_a_step_is_measured_beside_its_bound(run):
    rows = json.loads(run[0].read_text())["rows"]
    for method, layout in (("ours", "zigzag"), ("tensor-v1", "contiguous")):
        row = rows[f"step/llama-tiny-x1/60/{method}@2-cpu-float32"]
        seconds = row["milliseconds"]["median"] / 1e3
        assert row["milliseconds"]["count"] == 2 and len(row["losses"]) == 2 + len(row["warm_up_milliseconds"])
        assert row["ratio"] == pytest.approx(seconds / row["bound"]["total"])
        rates = Rates(**{name: sum(both) / 2 * 1e12 for name, both in row["rates"].items()})
        at = TrainCell(**row["cell"])
        assert row["bound"]["total"] == pytest.approx(bound(at, rates).total)
        assert row["tokens_per_second"] == pytest.approx(60 / seconds / 2) and row["layout"] == layout
        assert row["mfu"] is None and row["peak_memory_gib"] is None and row["tensor"] == (1 if method == "ours" else 2)


@pytest.mark.long
def test_the_same_command_starts_nothing_more(run, monkeypatch):
    output, words = run
    before = json.loads(output.read_text())["rows"]
    monkeypatch.setattr(job_module, "launch", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", "train", *words]) == 0
    assert json.loads(output.read_text())["rows"] == before
    assert Path(output).with_suffix(".md").exists() and output.with_name("r-loss-llama-tiny-x1cpu-float32.png").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ranks", "2", "--preset", "llama-3-9b"), "'llama-3-9b' | 'llama-3-8b'"),
        (("--ranks", "2", "--methods", "ulises"), "'ulises' | 'ulysses'"),
        (("--ranks", "2", "--layers", "0"), "--layers 0 | allowed: "),
        (("--ranks", "2", "--tokens", "102"), "--tokens 102 | 2 ranks"),
        (("--ranks", "2", "--preset", "llama-3-8b", "--layers", "33"), "--layers 33 | 1 to 32"),
        (("--ranks", "2", "--heads", "4"), "--heads | bench attention"),
        (("--ranks", "2", "--recompute", "all"), "recompute | 'all' | known: "),
        (("--ranks", "2", "--recompute", "block+first-x"), "'block+first-x' | 'x' | fix: +first-4"),
        (("--ranks", "2", "--kernel", "fa4"), "kernel | 'fa4' | NVIDIA | cpu"),
        (("--ranks", "2", "--text", "no/such"), "--text no/such | does not exist"),
        (("--ranks", "2", "--dtype", "float16"), "--dtype float16"),
        (("--ranks", "2", "--steps", "-1"), "--steps -1"),
        (("--ranks", "2", "--batch", "0"), "--batch 0 | at least 1"),
        (("--ranks", "2", "--zero", "1"), "--zero 1 | 2, 3 or 2,3"),
        (("--gpus", "2"), "no GPU | fix: --ranks"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(argv, words, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(job_module, "launch", lambda *_: pytest.fail("ranks were started"))
    assert main(["bench", "train", *argv]) == 2
    says(capsys.readouterr().err, words)
