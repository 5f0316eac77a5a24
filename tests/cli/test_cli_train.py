"""`bmburst train`: what is settled before ranks start, and what ranks are given."""

import json
import re
from pathlib import Path

import pytest

from bmburst.cli import main
from bmburst.cli.training import COMMON
from bmburst.config import leaves
from bmburst.launch.devices import Gpu
from bmburst.train.config import EvalConfig, TrainConfig
from bmburst.train.resolve import resolve
from bmburst.train.schedule import learning_rate
from tests.cli.commands import checkpoint, refused, see_gpus, started
from tests.refusals import says

# Help


@pytest.mark.parametrize(("command", "config"), [("train", TrainConfig()), ("eval", EvalConfig)])
def test_help_shows_every_field_with_unit_and_default(command, config, capsys):
    main([command, "--help", "all"])
    text = capsys.readouterr().out
    # One entry from its option to the next option or group.
    entries = re.split(r"\n(?=  -|\S)", text)
    for leaf in leaves(config):
        option = "--" + (leaf.name if "." in leaf.name else leaf.name.replace("_", "-"))
        found = [entry for entry in entries if re.match(rf"  (--[\w.-]+, )?{re.escape(option)}\s", entry)]
        assert len(found) == 1, leaf.name
        entry = " ".join(found[0].split())
        assert leaf.spec.help, leaf.name
        assert leaf.spec.help in entry
        assert re.search(r"[\[ ](default [^]]|no default)", entry), leaf.name
        assert not leaf.spec.unit or f"[{leaf.spec.unit};" in entry
        assert ("[tokens; also as 64K for 65536;" in entry) == (leaf.spec.unit == "tokens")
        if leaf.annotation in (int, float, int | None, float | None):
            assert leaf.spec.unit or "[no unit;" in entry, leaf.name
    if command == "train":
        assert text.index("\nrun:") < text.index("\nmodel") < text.index("\ndata:") < text.index("\nranks:")
    # The other spelling of an option works, but is not shown beside it.
    assert re.search(r"--sequence.length, --sequence.length", text) is None


def test_help_shows_the_twenty_settings_that_people_use(capsys):
    by_name, own = {leaf.name: leaf for leaf in leaves(TrainConfig())}, ("--config", "--all", "--json")
    without = {"epochs", "output", "checkpoint_every", "eval_every", "resume"}
    for command, others, hidden in (("check", 4, without), ("train", 1, set())):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        shown = [leaf.name for leaf in leaves(TrainConfig()) if f"\n  --{option_of(leaf)} " in text]
        assert set(shown) == COMMON.keys() - hidden and len(COMMON) == 20
        usage, *options = re.split(r"\n(?=  --)", text.rstrip())
        assert "--help all" in usage and len(options) == len(shown) + others  # each in a line
        assert max(map(len, options)) < 80
        # In the order of the list, each with its default.
        assert sorted(shown, key=lambda name: text.index(f"\n  --{option_of(by_name[name])} ")) == [
            name for name in COMMON if name in shown
        ]
        assert all(line.endswith("]") for line in options if line.split()[0] not in own), options
    assert "\n  --steps " in text and "Total optimizer steps [200]\n" in text
    says(refused(capsys, "train", "--help", "everything"), "--help everything | all")


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("plan", "--optimizer.state | [float32] | --nproc | [8; with", "--shared-prompt | --lora.rank_pattern"),
        ("eval", "--checkpoint | --by-position | --depths | [0,.25,.5,.75,1]", "--text-field | --hang-timeout"),
        ("generate", "--prompt | --dtype | Type of weights [auto]", "--min-p | --chunk-tokens"),
    ],
)
def test_help_of_other_commands_shows_at_most_twenty_in_a_line_each(capsys, command, shown, hidden):
    assert main([command, "--help"]) == 0
    _, *lines = re.split(r"\n(?=  --)", short := capsys.readouterr().out.rstrip())
    assert 15 <= len(lines) <= 20 and not any("\n" in line for line in lines)
    says(short, shown, f"bmburst {command} --help all", lines=30)
    assert main([command, "--help", "all"]) == 0
    whole = capsys.readouterr().out
    for name in hidden.split(" | "):
        assert name not in short and f"  {name} " in whole


def option_of(leaf):
    if leaf.name == "data.source":
        return "data"
    name = leaf.name.removeprefix("parallel.")
    return name if "." in name else name.replace("_", "-")


# A fresh run


def test_the_main_job_starts_two_ranks_in_a_new_folder(launches):
    assert main(["train"]) == 0
    assert launches.spec.nproc == 2
    assert re.fullmatch(r"runs/\d{8}-\d{6}-llama-tiny", str(launches.output()))
    assert resolve((launches.output() / "config.json",)) == TrainConfig()
    assert launches.config()["resume"] is False


def test_two_runs_of_the_same_second_get_folders_of_their_own(launches, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20250101-000000")
    names = []
    for _ in range(3):
        main(["train"])
        names.append(launches.output().name)
    assert names == [f"20250101-000000-llama-tiny{end}" for end in ("", "-2", "-3")]


def test_options_short_dotted_and_in_either_spelling(launches, tmp_path):
    (tmp_path / "x.txt").write_text("text" * 20)
    (tmp_path / "c.yaml").write_text("steps: 5\nseed: 3\n")
    assert (
        main(
            [
                *("train", "--config", "c.yaml", "--data", "x.txt", "--sequence_length", "64", "--steps=6"),
                *("--parallel.layout", "striped", "--sequence-parallel", "2", "--parallel.data-parallel", "2"),
                *("--batch-size", "4", "--optimizer.clip-norm", "none", "--model.tie_embeddings", "--output", "out"),
                *("--model.num_layers", "1", "--optimizer.beta1", "0.8", "--parallel.deterministic", "false"),
            ]
        )
        == 0
    )
    values = launches.config()
    assert (values["steps"], values["seed"], values["sequence_length"], values["batch_size"]) == (6, 3, 64, 4)
    assert values["data"]["source"] == "x.txt"
    assert values["parallel"] | {"layout": "striped", "data_parallel": 2, "sequence_parallel": 2} == values["parallel"]
    assert values["optimizer"] | {"clip_norm": None, "beta1": 0.8} == values["optimizer"]
    assert values["parallel"]["deterministic"] is False
    assert (values["model"]["num_layers"], values["model"]["tie_embeddings"]) == (1, True)
    assert launches.spec.nproc == 4, "data parallel x sequence parallel"
    assert launches.output() == Path("out")


def test_tokens_may_be_counted_in_k_and_m(launches, tmp_path):
    (tmp_path / "c.yaml").write_text("sequence_length: 64K\nmodel: {max_position_embeddings: 1M}\n")
    argv = ["--sequence-length", "32k", "--mlp-chunk-tokens", "1M", "--loss-chunk-tokens", "2K", "--sample-tokens=0"]
    assert main(["train", "--config", "c.yaml", *argv]) == 0
    values = json.loads((launches.output() / "config.json").read_text())
    assert (values["sequence_length"], values["model"]["max_position_embeddings"]) == (32768, 1048576)
    assert (values["mlp_chunk_tokens"], values["loss_chunk_tokens"], values["sample_tokens"]) == (1048576, 2048, 0)


@pytest.mark.parametrize(
    ("argv", "nproc"),
    [
        ([], 2),
        (["--nproc", "3"], 3),
        (["--data-parallel", "4", "--batch-size", "4"], 4),
        (["--sequence-parallel=5"], 5),
    ],
)
def test_number_of_ranks(launches, argv, nproc):
    assert main(["train", *argv]) == 0
    assert launches.spec.nproc == nproc


def test_all_gpus_are_used_and_no_more(launches, monkeypatch, capsys, tmp_path):
    see_gpus(monkeypatch, *[Gpu("Tesla T4", (7, 5))] * 7)
    see_gpus(monkeypatch, by="cli.training")  # whose choices are another test's
    assert main(["train"]) == 0
    assert launches.spec.nproc == 7
    assert "does not divide 7 ranks" in refused(capsys, "train", "--data-parallel", "2", "--batch-size", "2")
    found = len(list(tmp_path.rglob("*")))
    assert "more than the 7 GPU(s)" in refused(capsys, "train", "--nproc", "8")
    assert len(list(tmp_path.rglob("*"))) == found, "a folder was left"
    assert len(launches) == 1


def test_an_empty_folder_may_be_named(launches, tmp_path):
    (tmp_path / "run").mkdir()
    assert main(["train", "--output", "run"]) == 0
    assert main(["train", "--output", "deep/er/run"]) == 0
    assert (tmp_path / "deep/er/run/config.json").is_file()


def test_an_occupied_folder_is_refused_before_the_data_are_read(launches, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "short.txt").write_text("x")
    for folder, words in (("run", "not empty, it holds checkpoints"), ("new", "too few")):
        assert words in refused(capsys, "train", "--output", folder, "--data", "short.txt")


def test_a_run_that_left_only_its_configuration_can_be_begun_again(launches, tmp_path, capsys):
    assert main(["train", "--output", "run"]) == 0
    assert main(["train", "--output", "run", "--steps", "3"]) == 0
    assert launches.config()["steps"] == 3
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    assert "not empty, it holds config.json" in refused(capsys, "train", "--output", "run")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--preset", "lama-tiny"], "preset | 'lama-tiny' | 'llama-tiny'"),
        (["--optimizer.lrr", "1"], "'--optimizer.lrr' | '--optimizer.lr'"),
        (["--step", "1"], "'--step' | '--steps'"),
        (["--layout", "zig"], "layout | 'zig' | balanced, contiguous, striped, zigzag"),
        (["--steps", "0"], "steps | '0' | at least 1"),
        (["--steps", "-5"], "steps | '-5' | at least 1"),
        (["--steps", "ten"], "steps | 'ten' | integer"),
        (["--steps", "2K"], "steps | '2K' | an integer at least 1\n"),
        (["--sequence-length", "64G"], "sequence_length | '64G' | at least 1 | 64K for 65536"),
        (["--mlp-chunk-tokens", "-1K"], "--mlp-chunk-tokens | one argument"),
        (["--mlp-chunk-tokens=-1K"], "mlp_chunk_tokens | '-1K' | at least 0 | 64K"),
        (["--steps"], "--steps | one argument"),
        (["--resume", "maybe"], "resume | 'maybe' | true or false"),
        (["--data", "gone.txt"], "data gone.txt | no such file | allowed: "),
        (["--data", "empty.txt"], "empty.txt | empty"),
        (["--data", "/dev/zero"], "data /dev/zero | device | allowed: a text"),
        (["--checkpoint-every", "ever"], "checkpoint_every | 'ever' | at least 0 | never"),
        (["--data", "latin.txt"], "'latin.txt' | text file | byte 4 | UTF-8"),
        (
            ["--data", "lines.jsonl"],
            "lines.jsonl:1 | 'text' | 'body', 'number' | fix: | name its field | --messages-field | --columns",
        ),
        (["--data", "lines.jsonl", "--data.text_field", "number"], "'number' | string | 5 | name another"),
        (["--data.tokenizer", "full"], "tokenizer.json | 'full'"),
        (["--data.tokenizer", "bad.json"], "tokenizer | 'bad.json'"),
        (["--config", "gone.yaml"], "gone.yaml | no such"),
        (["--config", "bad.yaml"], "bad.yaml | YAML | line 2"),
        (["--init-from", "gone"], "init_from gone | no such directory | fix: "),
        (["--init-from", "Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B | hf download Qwen/Qwen3-0.6B --local-dir"),
        (["--data", "tatsu-lab/alpaca"], "tatsu-lab/alpaca | hf download --repo-type dataset tatsu-lab/alpaca"),
        (["--data", "a.jsonl,b.jsonl"], "a.jsonl,b.jsonl | several | YAML"),
        (["--data", "data/*.jsonl"], "data/*.jsonl | patterns | give the folder"),
        (["--nproc", "3", "--data-parallel", "2"], "data_parallel 2 | 3 ranks | allowed: | fix: "),
        (["--nproc", "2", "--sequence-parallel", "3"], "--nproc 3"),
        (["--data-parallel", "2"], "--batch-size 2"),
        (["--preset", "llama-3-70b"], "on the CPU | 2 ranks | allowed: | free memory | fix: GPUs, a smaller model"),
        (["--sequence-length", "1"], "sequence_length 1 | sequence ranks"),
        (["--output", "full"], "output full | not empty | x"),
        (["--output", "full/x"], "full/x | file"),
        (["--output", "full/x/run"], "output full/x/run | written | Not a directory | fix: give a folder"),
        (["--output", "/proc/none"], "output /proc/none | written | No such file | fix: give a folder"),
        (["--data.cache", "full/x"], "data.cache full/x | written | Not a directory | fix: give a folder"),
        (["--data.cache", "full/x/y"], "data.cache full/x/y | written | Not a directory"),
        (["--output", "cut/run"], "data.cache cut/tokens | written | Not a directory"),
        (["--output", "x" * 5000], "output | at most 255"),
        (["--resume"], "--resume | run"),
        (["--resume", "--output", "gone"], "gone | not a run folder"),
        (["--resume", "--output", "full"], "full | not a run folder"),
        (["--model.num_kv_heads", "3"], "num_kv_heads 3 | allowed: 1, 2, 4"),
        (["train"], "'train'"),
    ],
)
def test_bad_input_starts_nothing_and_leaves_nothing(launches, tmp_path, capsys, argv, words):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.yaml").write_text("steps: 1\n  seed: 2\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "latin.txt").write_bytes(b"text\xe9 text")
    (tmp_path / "lines.jsonl").write_text('{"body": "text", "number": 5}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "tokens").touch()
    found = sorted(tmp_path.rglob("*"))
    says(refused(capsys, "train", *argv), words)
    assert not launches
    assert sorted(tmp_path.rglob("*")) == found, "something was left"


def test_a_run_folder_is_no_model_but_its_checkpoints_are(launches, tmp_path, capsys):
    checkpoint(started(tmp_path), 4)
    says(refused(capsys, "train", "--init-from", "run"), "init_from run", "fix: ", "run/checkpoints/step-000004")


# Resume


def test_resume_takes_the_runs_own_configuration(launches, tmp_path):
    checkpoint(started(tmp_path, steps="9", seed="5"), 4)
    for argv in (["--output", "run"], ["--config", "run/config.json"], ["--config", "run/config.json", "--output=run"]):
        assert main(["train", "--resume", *argv]) == 0
        assert launches.config()["resume"] is True
        assert launches.output() == Path("run")
        assert (launches.config()["seed"], launches.config()["steps"]) == (5, 9)
    assert len(launches) == 3


def test_resume_auto_begins_where_there_is_no_checkpoint_and_continues_where_there_is_one(launches, tmp_path, capsys):
    for steps in ("9", "10"):  # the second start finds what a first one left that saved nothing
        assert main(["train", "--resume", "auto", "--output", "run", "--steps", steps]) == 0
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        assert (launches.config()["resume"], launches.config()["steps"]) == ("auto", int(steps))
    assert resolve((tmp_path / "run" / "config.json",)).steps == 10
    says(refused(capsys, "train", "--resume", "auto", "--output", "run", "--seed", "4"), "seed 4 | 0 | run")
    checkpoint(tmp_path / "run", 4)
    assert main(["train", "--resume", "auto", "--output", "run"]) == 0
    assert (launches.config()["resume"], launches.config()["steps"]) == (True, 10)
    assert "going on from run/checkpoints/step-000004" in capsys.readouterr().err
    says(refused(capsys, "train", "--resume", "auto"), "--output")
    says(refused(capsys, "train", "--resume", "maybe", "--output", "run"), "resume | 'maybe' | true or false | auto")


def test_a_finished_run_says_so_and_a_larger_number_of_steps_goes_on(launches, tmp_path, capsys):
    checkpoint(started(tmp_path, steps="9"), 9)
    assert main(["train", "--resume", "--output", "run"]) == 0
    assert not launches
    assert "run: finished with 9 steps" in capsys.readouterr().err
    assert main(["train", "--resume", "--output", "run", "--steps", "3"]) == 0
    assert not launches
    assert main(["train", "--resume", "--output", "run", "--data.cache", "run/config.json/x"]) == 0, "it has all"
    assert not launches
    rates = [{"step": step, "lr": 1e-3 * step} for step in (8, 9)]
    lines = "".join(json.dumps(rate) + "\n" for rate in rates)
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{lines}{{"step": 10, "l')  # killed while it wrote a line
    capsys.readouterr()
    assert main(["train", "--resume", "--output", "run", "--steps", "12"]) == 0
    assert launches.config()["steps"] == 12
    says(capsys.readouterr().err, "learning rate jumps from 0.009 at step 9 | 12 steps", lines=3)
    rates[1]["lr"] = learning_rate(resolve((tmp_path / "run" / "config.json",)).schedule, 0.009, 9, 12)
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(rates[1]) + "\n")
    assert main(["train", "--resume", "--output", "run", "--steps", "12", "--optimizer.lr", "0.009"]) == 0
    assert "jumps" not in capsys.readouterr().err
    for folder in ("run", "run/checkpoints/step-000009"):
        says(refused(capsys, "train", "--resume", folder), "takes no folder | fix: --output run --resume")


def test_resume_lays_another_file_over_the_runs_own(launches, tmp_path):
    checkpoint(started(tmp_path, steps="9", seed="5"), 4)
    (tmp_path / "more.yaml").write_text("steps: 11\noutput: run\n")
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert main(["train", "--resume", "--config", "more.yaml", "--optimizer.lr", "0.5"]) == 0
    values = launches.config()
    assert (values["steps"], values["seed"], values["optimizer"]["lr"]) == (11, 5, 0.5)
    # A rank may refuse it yet, and the next --resume begins from the run's own again.
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_resume_that_cannot_work(launches, tmp_path, capsys):
    run = started(tmp_path, seed="5")
    before = (run / "config.json").read_text()
    assert "no complete checkpoint" in refused(capsys, "train", "--resume", "--output", "run")
    checkpoint(run, 4)
    (checkpoint(run, 8) / "state.json").write_text('{"format": "bmb')
    says(refused(capsys, "train", "--resume", "--output", "run", "--seed", "6"), "seed 6", "5")
    text = refused(capsys, "train", "--resume", "--output", "run", "--preset", "llama-2-7b")
    assert "no effect" in text
    (run / "config.json").write_text("{")
    says(refused(capsys, "train", "--resume", "--output", "run"), "config.json", "JSON", "line 1")
    (run / "config.json").write_text(before)
    assert not launches
    assert main(["train", "--resume", "--output", "run"]) == 0, "the checkpoint before the torn one serves"


def test_begun_without_resume_a_run_is_not_overwritten(launches, tmp_path, capsys):
    checkpoint(started(tmp_path), 4)
    assert "--resume to continue" in refused(capsys, "train", "--output", "run")
    assert "it holds checkpoints" in refused(capsys, "train", "--output", "run", "--resume", "false")
