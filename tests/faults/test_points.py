"""What is done to runs is decided by a seed alone; the record says what came of it."""

import json
from collections import Counter
from dataclasses import asdict, replace

from benchmarks.faults.__main__ import OutcomeLog, main, outcome_of, record, table
from benchmarks.faults.inject import FaultOutcome
from benchmarks.faults.kinds import KINDS, faults, flipped_bit, with_flipped
from benchmarks.faults.programs import STEPS, Fault, RunTiming, RunWatch, base_of, left_in, newest

FACTS = {
    "date": "2026-11-22",
    "device": "a CPU",
    "cores": 2,
    "commit": "abc",
    "python": "3",
    "torch": "2",
    "bmburst": "1",
    "minutes": 3.2,
    "command": "python -m benchmarks.faults",
    "notes": ["Lost and slow nodes are left out: no root."],
}
TIMING = RunTiming(start=1.0, step=0.1, evaluation=0.1, checkpoint=0.1, rename=0.1, total=3.0)


def test_a_seed_decides_the_list_whatever_else_is_asked_for():
    whole = faults(7)
    assert whole == faults(7) and whole != faults(8)
    assert Counter(fault.kind for fault in whole) == {name: kind.points for name, kind in KINDS.items()}
    kills = [fault for fault in whole if fault.kind == "kill"]
    assert kills[:5] == list(faults(7, ["kill"], points=5))
    assert len({fault.seed for fault in whole}) == len(whole)


def test_every_moment_meets_every_target():
    for name, kind in KINDS.items():
        counts = Counter((fault.moment, fault.target) for fault in faults(0, [name]))
        cases = len(kind.moments) * len(kind.targets)
        assert len(counts) == min(cases, kind.points), name
        assert max(counts.values()) - min(counts.values()) <= 1, name
    kills = Counter(fault.moment for fault in faults(0, ["kill"]))
    assert kills == dict.fromkeys(("start", "step", "evaluation", "checkpoint", "rename"), 20)


def test_draws_differ_by_name_and_stay():
    fault = Fault("kill", "step", "rank 0", 5)
    assert fault.draw("delay") == fault.draw("delay") != fault.draw("step")
    assert all(0 <= Fault("kill", "step", "all", seed).draw("delay") < 1 for seed in range(100))


def test_a_flip_changes_one_bit_of_the_part_it_names():
    content = bytes(range(200))
    for fault in faults(3, ["flip"]):
        bit = flipped_bit(fault, len(content))
        first, last = {"head": (0, 63), "tail": (136, 199), "anywhere": (0, 199)}[fault.moment]
        assert first <= bit // 8 <= last
        changed = with_flipped(content, bit)
        assert sum((a ^ b).bit_count() for a, b in zip(content, changed, strict=True)) == 1
        assert flipped_bit(fault, 10) < 80


def test_a_table_counts_what_is_wrong():
    planned = faults(0, ["kill", "flip"], points=4)
    kill, flip = planned[0], planned[4]
    outcomes = [
        FaultOutcome(kill, 1.25),
        FaultOutcome(planned[1], 7.5, survivors=2, differs=True),
        FaultOutcome(flip, 3.0, unseen=True),
        FaultOutcome(planned[5], 2.0, problems=("a", "b")),
    ]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table(planned, outcomes).splitlines()[2:]
    ]
    assert rows == [
        ["kill -9", "4", "2", "2", "1", "", "0", "7.5"],
        ["flipped bit", "4", "2", "0", "0", "1", "1", "3.0"],
    ]
    text = record(FACTS, planned, outcomes)
    assert str(planned[1]) in text and "2 survivors; differs" in text and "a; b" in text and "no root" in text
    assert str(kill) not in text and "Nothing." not in text
    assert "Nothing." in record(FACTS, planned, outcomes[:1])


def test_outcomes_are_written_as_they_come_and_taken_up_again(tmp_path):
    planned, file = faults(0, ["kill"], points=3), tmp_path / "faults_cpu.md"
    log = OutcomeLog(dict(FACTS), planned, file)
    log.add(FaultOutcome(planned[1], 1.0, problems=("odd",), left="1 whole"))
    assert outcome_of(json.loads(file.with_suffix(".json").read_text())["outcomes"][0]) == log.outcomes[0]
    assert "| kill -9 | 3 | 1 |" in file.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["faults_cpu.json", "faults_cpu.md"]
    again = OutcomeLog(dict(FACTS), planned, file)
    assert again.go_on() == [planned[0], planned[2]] and again.outcomes == log.outcomes
    assert OutcomeLog({**FACTS, "commit": "another"}, planned, file).go_on() == list(planned)
    assert asdict(log.outcomes[0])["fault"]["kind"] == "kill"


def test_the_command_lists_faults_and_refuses_unknown_kinds(capsys):
    assert main(["--list", "--seed", "4", "--kinds", "flip,kill", "--points", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(fault) for fault in faults(4, ["flip", "kill"], points=2)]
    assert main(["--kinds", "kill,rain"]) == 2
    assert "rain" in capsys.readouterr().err


def test_what_differs_from_the_undisturbed_run_is_found(tmp_path):
    base = base_of(_finished(tmp_path / "base"), TIMING)
    assert base.difference(_finished(tmp_path / "same"), complete=True) == ""
    part = _finished(tmp_path / "part", steps=7)
    assert base.difference(part, complete=False) == "" != base.difference(part, complete=True)
    (tmp_path / "part" / "metrics.jsonl").open("a").write('{"step": 8, "lo')  # torn by a kill
    assert base.difference(part, complete=False) == ""
    assert "step 3" in base.difference(_finished(tmp_path / "loss", changed=3), complete=False)
    held_out = _finished(tmp_path / "held_out")
    (held_out / "evals.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
    assert "evaluation" in base.difference(held_out, complete=False)
    weights = _finished(tmp_path / "weights")
    (weights / "checkpoints/step-000012/model.safetensors").write_bytes(b"other")
    assert base.difference(weights, complete=False) == ""
    assert "model.safetensors" in base.difference(weights, complete=True)


def test_a_watch_sees_only_what_is_new(tmp_path):
    run = _finished(tmp_path / "run", steps=7, whole=6)
    hidden = run / "checkpoints" / ".step-000009"
    hidden.mkdir()
    (hidden / "model.safetensors").touch()
    assert (newest(run), left_in(run)) == (6, "1 whole, 1 files of an unnamed one")
    watch = RunWatch(run)
    assert watch.done == 6
    assert not any((watch.has_step(7), watch.is_begun(9), watch.is_written(9), watch.is_there(6)))
    _write_lines(run, 8)
    assert watch.has_step(7) and watch.has_step(8) and not watch.has_step(9)
    (hidden / "state.json").touch()
    assert watch.is_begun(9) and watch.is_written(9) and not watch.is_there(9)
    hidden.rename(run / "checkpoints" / "step-000009")
    assert watch.is_there(9) and watch.is_begun(9)
    evaluation, rename = (Fault("kill", moment, "all", 1) for moment in ("evaluation", "rename"))
    assert {RunWatch(run).due("evaluation", evaluation)() for _ in range(3)} == {False}  # of step 12
    assert RunWatch(run).done == 9 and not RunWatch(run).due("rename", rename)()
    assert watch.due("step", replace(evaluation, seed=2))() == (_drawn(2, range(7, 13)) <= 8)


def _drawn(seed, steps):
    return steps[int(Fault("kill", "step", "all", seed).draw("step") * len(steps))]


def _finished(run, steps=STEPS, whole=STEPS, changed=0):
    """Write the files of a run that are compared."""
    folder = run / "checkpoints" / f"step-{whole:06d}"
    folder.mkdir(parents=True)
    for name in ("model", "optimizer", "random"):
        (folder / f"{name}.safetensors").write_bytes(name.encode())
    _write_lines(run, steps, changed)
    return run


def _write_lines(run, steps, changed=0):
    lines = [
        {"step": step, "loss": 1.0 / step + (step == changed), "bits_per_byte": 1.0, "lr": 0.1, "grad_norm": 1.0}
        for step in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evals = [{"step": step, "loss": 1.0} for step in range(4, steps + 1, 4)]
    (run / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
