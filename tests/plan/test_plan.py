"""Ways, times, ranking and the command line of `bmburst plan`."""

import json
import shlex
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise, product

import pytest

from bmburst.blocks.presets import PRESETS
from bmburst.cli import CommandParser, main
from bmburst.cli import training as train_command
from bmburst.cli.program import NOTHING_FITS
from bmburst.config import given_options
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.counts import attention_flops
from bmburst.plan.memory import reserved_memory
from bmburst.plan.presentation import options
from bmburst.plan.search import best_of_each, predict, search
from bmburst.plan.step import collective, model_flops, step_time, utilisation
from bmburst.plan.ways import candidates
from bmburst.recompute.policy import POLICIES
from bmburst.schedule.hardware import load_hardware, shipped
from bmburst.schedule.layout import make_layout
from bmburst.schedule.parallelism import MeshShape
from bmburst.train.config import TrainConfig
from bmburst.train.machine import planned
from bmburst.train.resolve import resolve
from tests.pairs import long
from tests.refusals import refused, says

H200 = load_hardware("h200")
ODD = replace(PRESETS["llama-3-8b"], num_heads=12, num_kv_heads=12, head_dim=128, max_position_embeddings=1 << 22)


def task(preset="llama-3-8b", sequence=1 << 17, gpus=8, nodes=1, **more):
    return Task(model=PRESETS[preset], preset=preset, sequence=sequence, gpus=gpus, nodes=nodes, **more)


def way(of, degree=1, outer="none", data=1, tensor=1, **more):
    return Candidate(task=of, data=data, tensor=tensor, ulysses_degree=degree, outer=outer, **more)


@pytest.mark.parametrize(("gpus", "nodes", "batch"), [(1, 1, 1), (6, 1, 2), (16, 2, 4), (64, 8, 1), (4096, 512, 64)])
def test_every_way_is_a_mesh_that_can_share_the_model(gpus, nodes, batch):
    asked = task(gpus=gpus, nodes=nodes, batch=batch)
    found = candidates(asked)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        shape = MeshShape(each.data, each.sequence, each.tensor)
        assert shape.size == gpus and batch % each.data == 0
        own, own_kv = shape.require_heads(asked.model.num_heads, asked.model.num_kv_heads)
        assert (own, own_kv) == (each.own_heads, each.own_kv_heads)
        assert each.ulysses_degree * each.groups == each.sequence and own % each.ulysses_degree == 0
        assert (each.outer == "none") == (each.groups == 1)
        assert asked.gpus_per_node % each.tensor == 0
    assert {each.recompute for each in found} == set(POLICIES)
    assert any(each.outer == "double-ring" for each in found) == (nodes > 1 and gpus // nodes > 1)


@pytest.mark.parametrize(("sequence", "gpus"), [("131072", "8"), ("4M", "4")])
def test_the_table_is_in_the_order_of_its_numbers(sequence, gpus, capsys):
    """At 128K tokens the second line was slower than the third; at 4M tokens some do not fit."""
    assert main(["plan", "--preset", "llama-3-8b", "--sequence-length", sequence, "--nproc", gpus]) == 0
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()[1:]
    fitting = [row for row in rows if not row.endswith("does not fit")]
    others = rows[len(fitting) :]
    assert not {*others} & {*fitting} and len(rows) > 3
    numbers = [[float(word.replace(",", "").rstrip("%")) for word in row.split()[:4]] for row in rows]
    assert [each[0] for each in numbers[: len(fitting)]] == sorted(each[0] for each in numbers[: len(fitting)])
    for column in (1, 2):
        speeds = [each[column] for each in numbers[: len(fitting)]]
        assert speeds == sorted(speeds, reverse=True)
    assert [each[3] for each in numbers[len(fitting) :]] == sorted(each[3] for each in numbers[len(fitting) :])


def test_flops_are_those_of_the_definition():
    model, length = PRESETS["llama-tiny"], 24
    pairs = sum(query + 1 for query in range(length))
    scores = 2 * 2 * pairs * model.num_heads * model.head_dim  # QK and PV, 2 FLOPs a number
    assert attention_flops(model, length) == pytest.approx(scores * length / (length + 1))
    matrices = model.num_parameters - model.vocab_size * model.hidden_size
    asked = Task(model=model, sequence=length, gpus=1, batch=3)
    expected = 3 * (6 * matrices * length + 3 * model.num_layers * attention_flops(model, length))
    assert model_flops(asked) == expected
    seen = sum(min(query + 1, 4) for query in range(length))
    windowed = replace(model, sliding_window=4)
    assert attention_flops(windowed, length) / attention_flops(model, length) == pytest.approx(seen / pairs, rel=0.05)
    less = 9 * model.num_layers * (attention_flops(model, length) - attention_flops(windowed, length))
    assert model_flops(replace(asked, model=windowed)) == pytest.approx(expected - less)


@pytest.mark.parametrize(("heads", "outer"), [(8, "none"), (1, "ring"), (1, "gather"), (4, "ring"), (2, "gather")])
@pytest.mark.parametrize("preset", ["llama-2-7b", "llama-3-8b"])
def test_bytes_are_those_of_the_tensors(preset, heads, outer):
    """Counted from shapes, rank by rank, as `bmburst.attention.schedule` and the exchanges move them."""
    asked = task(preset)
    own, model, ranks = way(asked, heads, outer).sizes, asked.model, 8
    tokens = make_layout("zigzag", ranks, asked.sequence // ranks).tokens
    vector = model.head_dim * 2
    sizes = own.shapes
    assert sizes.q_bytes == tokens * model.num_heads * vector
    assert sizes.k_bytes == tokens * model.num_kv_heads * vector * max(1, heads // model.num_kv_heads)
    groups, rows = ranks // heads, tokens * heads  # after the exchange of heads
    kv = rows * max(1, model.num_kv_heads // heads) * vector
    assert 2 * sizes.k_bytes == 2 * kv and own.gather_bytes == 2 * kv * (groups - 1)
    if outer == "ring":
        q = rows * (model.num_heads // heads) * vector
        statistics = rows * (model.num_heads // heads) * 4
        queries = (groups - 1) * (2 * q + 2 * statistics) + groups * 2 * q
        keys = (groups - 1) * 2 * kv + groups * 4 * kv
        assert own.strategy.ring_tensors == ("q" if queries <= keys else "kv")
        assert sizes.ring_bytes(own.strategy.ring_tensors) == (
            (2 * q + 2 * statistics, 2 * q) if queries <= keys else (2 * kv, 4 * kv)
        )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name != "h200" else ()) for name in shipped()]
)
def test_more_work_takes_longer_and_more_gpus_less(name):
    machine = load_hardware(name)
    lengths = [predict(way(task(sequence=n), 8), machine).seconds for n in (1 << 15, 1 << 17, 1 << 20)]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3
    long = [search(task(sequence=1 << 20, gpus=n, nodes=max(1, n // 8)), machine)[0] for n in (4, 8, 64, 512)]
    assert [each.seconds for each in long] == sorted((each.seconds for each in long), reverse=True)
    assert all(0 < each.utilisation < 1 for each in long)


def test_factors_on_what_blocks_add_cost_their_backward():
    model = PRESETS["minicpm-2b"]
    scaled, plain = (way(task("minicpm-2b", gpus=1), recompute="none") for _ in range(2))
    without = replace(model, scale_emb=None, scale_depth=None, dim_model_base=None)
    plain = replace(plain, task=replace(plain.task, model=without))
    more = step_time(scaled, H200).elementwise - step_time(plain, H200).elementwise
    read_and_written = 2 * 2 * 2 * (1 << 17) * model.hidden_size  # two gradients, each read and written, 2 bytes each
    assert more == pytest.approx(model.num_layers * H200.memory_seconds(read_and_written))


@pytest.mark.parametrize("slower", ["matmul", "attention_forward", "attention_backward", "memory_bandwidth"])
def test_a_slower_machine_is_slower(slower):
    best = way(task(), 8)
    assert predict(best, replace(H200, **{slower: getattr(H200, slower) / 2})).seconds > predict(best, H200).seconds


def test_heads_first_and_rings_where_heads_run_out():
    best = search(task(sequence=1 << 17), H200, tensor=[1])[0].candidate
    assert (best.ulysses_degree, best.outer) == (8, "none")
    few = Task(model=ODD, sequence=1 << 17, gpus=8)
    best = search(few, H200, tensor=[1])[0].candidate
    assert best.ulysses_degree == 4 and best.groups == 2  # 12 heads cannot be dealt to 8 ranks
    assert not any(each.candidate.ulysses_degree == 8 for each in search(few, H200, tensor=[1]))


def test_between_nodes_two_levels_beat_one_ring():
    """One pair of GPUs carries a flat ring from node to node; of two levels each GPU carries its part."""
    asked = task("llama-2-7b", 1 << 19, 32, 4)
    a800 = load_hardware("a800")
    flat, double, mixed = (
        way(asked, heads, outer, transport="nccl").attention_cost(a800)
        for heads, outer in ((1, "ring"), (1, "double-ring"), (8, "ring"))
    )
    exposed = [each.forward.exposed + each.backward.exposed for each in (flat, double, mixed)]
    assert exposed[0] > exposed[1] > 0 and exposed[0] > exposed[2]
    one = task("llama-2-7b", 1 << 19, 32, 1)
    inside = way(one, 1, "ring", transport="nccl").attention_cost(a800)
    assert inside.backward.exposed < flat.backward.exposed


def test_recomputation_costs_time_and_is_no_use():
    kept, again, none = (
        step_time(way(task(), 8, recompute=policy), H200) for policy in ("block-keep-attention", "block", "none")
    )
    assert none.total < kept.total < again.total
    assert none.recompute == 0
    attention = way(task(), 8).attention_cost(H200).forward.total * 32
    assert again.recompute - kept.recompute == pytest.approx(attention)
    shown = [utilisation(way(task(), 8), H200, each.total) for each in (none, kept, again)]
    assert shown == sorted(shown, reverse=True)


def test_layers_that_are_not_computed_again_cost_as_without():
    """Part by part, also where a whole MLP and one in chunks, ZeRO's transfers and a tensor group's differ."""
    for name in ("block", "block-keep-attention:0.5", "block+offload"):
        for base in (way(task(), 8), replace(way(task(gpus=4), 2), tensor=2)):
            first, all_, none = (
                asdict(step_time(replace(base, recompute=policy), H200)) for policy in (f"{name}+first-8", name, "none")
            )
            for part, seconds in first.items():
                assert seconds == pytest.approx(all_[part] / 4 + none[part] * 3 / 4), (name, part)


def test_a_search_tries_first_layers_where_not_all_can_keep_everything():
    found = search(task(sequence=1 << 18), H200)
    new = [each for each in found if each.candidate.policy.layers]
    beside = reserved_memory(task(), H200)
    most = beside + 0.95 * (H200.memory - beside)
    assert new and all(each.memory.total <= most for each in new)
    assert new[0] is found[0] and f"(first {new[0].candidate.policy.layers} layers; the rest keep all)" in (
        new[0].candidate.name
    )
    assert len(new) == len({each.candidate.name.partition(" (first")[0] + str(each.candidate.zero) for each in new})
    for each in new:
        fewer = replace(each.candidate, recompute="none")
        assert predict(fewer, H200).memory.total > most
    short = search(task(sequence=1 << 14), H200)
    assert not any(each.candidate.policy.layers for each in short if each.candidate.zero == 3)
    with refused("'block+first-32'", "32 layers", "fix: block", "block+first-1 to +first-31"):
        candidates(task(), recompute=["none", "block+first-32"])
    asked = search(task(sequence=1 << 18), H200, recompute=["none", "block-keep-attention:0.5"])
    assert not any(each.candidate.policy.layers for each in asked)


def test_parts_add_up_and_the_host_is_a_floor():
    time = step_time(way(task("llama-tiny", 4096, 1)), H200)
    assert time.host > 0 and time.total == pytest.approx(6 * H200.layer_host + time.attention + time.optimizer)
    assert step_time(way(task(), 8), H200).host == 0


def test_collectives_by_the_slower_of_links_and_nics():
    one, many = way(task(), 8), way(task(gpus=64, nodes=8), 8, "ring")
    nbytes = 1e9
    inside = collective(H200, one, nbytes, 8)
    assert inside == pytest.approx(nbytes * 7 / 8 / H200.collective_bandwidth + H200.nccl_latency)
    slow = replace(H200, inter_bandwidth=1e9)  # of 8 nodes 7 send theirs in, over the 8 NICs of this one
    expected = nbytes * 7 / 8 / 8e9 + 7 * slow.inter_latency / 2 + slow.nccl_latency
    assert collective(slow, many, nbytes, 64) == pytest.approx(expected)
    assert collective(H200, one, nbytes, 1) == 0


def test_what_fits_comes_first_and_the_fastest_of_it():
    found = search(task(sequence=1 << 20), H200)
    fits = [each.memory.fits for each in found]
    assert True in fits and False in fits and fits == sorted(fits, reverse=True)
    times = [each.seconds for each in found if each.memory.fits]
    assert all(later >= earlier * 0.998 for earlier, later in pairwise(times))
    shown = best_of_each(found, 5)
    assert shown[0] is found[0] and len(shown) == 5


@cache
def parser():
    """Return the parser of `bmburst train`, which is made of hundreds of options."""
    made = CommandParser(prog="bmburst train", description="")
    train_command.configure(made)
    return made


def read(words):
    return resolve((), given_options(parser().read(words), TrainConfig))


@pytest.mark.parametrize(("gpus", "batch", "dtype"), [(8, 4, "bfloat16"), (1, 1, "float32")])
def test_commands_are_those_of_the_trainer(gpus, batch, dtype):
    for each in candidates(task(sequence=4096, gpus=gpus, batch=batch, dtype=dtype)):
        config = read(options(each))
        degree = each.ulysses_degree
        heads = degree if 1 < degree < each.sequence else None  # the strategy's name says the others
        assert config.mesh_shape(gpus) == MeshShape(each.data, each.sequence, each.tensor, heads)
        config.validate(gpus)
        assert (config.recompute, config.parallel.zero_level) == (each.recompute, each.zero)
        assert (config.batch_size, config.dtype, config.sequence_length) == (batch, dtype, 4096)
        assert config.model.num_layers == 32


@pytest.mark.parametrize(
    ("changes", "policies"),
    [
        ({"sequence": 72 << 10, "shared_prompt": 64 << 10, "pack": "trees", "gpus": 2}, POLICIES),
        ({"gpus": 2}, ("block-keep-attention:0.3",)),
    ],
)
def test_ways_whose_ranks_would_keep_more_than_others_are_left_out(changes, policies):
    """The end of a sequence, of which attention is kept, is on each rank alike in some layouts only."""
    found = search(task(**changes), H200, recompute=policies)
    assert any(0 < each.candidate.policy.attention < 1 for each in found)  # of one rank a sequence
    for each in found:
        read(options(each.candidate)).validate(2)


def test_a_shared_prompt_saves_what_its_flops_are(capsys):
    """A prompt of 64K with two answers of 4K, beside each answer behind its own prompt: 1.8 times fewer FLOPs."""
    tree = task(sequence=72 << 10, shared_prompt=64 << 10, pairs=True)
    rows = task(sequence=68 << 10, batch=2, pairs=True)
    prompt, *answers = tree.tree.lengths
    assert tree.query_key_pairs == prompt**2 / 2 + sum(own * (prompt + own / 2) for own in answers)
    flops = model_flops(rows) / model_flops(tree)
    assert flops == pytest.approx(1.83, abs=0.01)
    best = [min(predict(each, H200).time.total for each in candidates(one)) for one in (tree, rows)]
    assert best[1] / best[0] == pytest.approx(flops, rel=0.05)
    asked = "--preset llama-3-8b --sequence-length 72K --dpo.beta 0.1 --shared-prompt 64K"
    assert plan(*asked.split()) == 0
    printed = capsys.readouterr().out
    assert "72K tokens (a prompt of 64K, 2 answers)" in printed
    config = read(shlex.split(printed.strip().splitlines()[-1])[2:])
    assert (config.pack, config.parallel.layout) == ("trees", "balanced")


def plan(*words):
    return main(["plan", *words])


def test_the_answer_says_what_is_best(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    assert plan("--preset", "llama-3-8b", "--sequence-length", "1048576", "--nproc", "8", "--output", str(picture)) == 0
    printed = capsys.readouterr().out
    assert "The best: data 1 x sequence 8, heads x8" in printed
    assert "does not fit" not in printed.splitlines()[3]
    command = shlex.split(printed.strip().splitlines()[-1])
    assert command[:4] == ["bmburst", "train", "--nproc", "8"]
    read(command[2:]).validate(8)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("gpus", "nodes"), [(64, 8), *(pytest.param(gpus, gpus // 8, marks=pytest.mark.long) for gpus in (512, 4096))]
)
def test_many_gpus_are_answered(gpus, nodes, capsys):
    words = f"--preset llama-3-8b --sequence-length 1M --nproc {gpus // nodes} --nodes {nodes}"
    words += " --batch-size 16 --json --ways 3"
    assert plan(*words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ways"]) == 3
    for each in found["ways"]:
        assert each["seconds"] == pytest.approx(sum(each["parts"].values()))
        assert each["memory"]["allocated"] == pytest.approx(sum(each["memory"]["lines"].values()))
        assert each["command"].startswith(f"torchrun --nnodes {nodes} --nproc-per-node 8")
        assert "--sequence-length 1048576 " in each["command"]


@pytest.mark.parametrize("words", ["--preset qwen3-8b --lora.rank 16", *long("--longest")])
def test_each_command_is_that_of_its_line(words, capsys):
    """A ring of rings between exchanges of heads has no name: a command gets what "auto" selects for the degree."""
    where = "--nproc 8 --nodes 2 --hardware a800 --json"
    length = "--sequence-length 32K --ways 99" if "--longest" not in words else "--preset llama-3-8b"
    assert plan(*f"{words} {where} {length}".split()) == 0
    found, hardware = json.loads(capsys.readouterr().out), load_hardware("a800")
    for each in found.get("ways") or found["longest"]:
        asked = shlex.split(each["command"])
        words = [word for word in asked[asked.index("train") + 1 : asked.index("--output")] if word != "DIR"]
        taken = planned(read(words), 16, 2, hardware)
        assert step_time(taken, hardware).total == pytest.approx(each["seconds"], rel=1e-9), each["command"]


def test_nothing_that_fits_is_said(capsys):
    assert plan("--preset", "llama-2-13b", "--sequence-length", "4194304", "--nproc", "1") == NOTHING_FITS
    printed = capsys.readouterr().out
    assert "No configuration fits" in printed.splitlines()[0]
    assert "inputs to host" in printed.splitlines()[5], "the first is nearest to fitting, not the fastest"


REFUSALS = {
    "--preset llama-3-8 --sequence-length 4096": "'llama-3-8' | 'llama-3-8b'",
    "--sequence-length 4096": "--preset | missing",
    "--preset llama-3-8b": "--sequence-length | missing",
    "--preset llama-3-8b --sequence-length 5 --nproc 8 --nodes 8": (
        "--sequence-length 5 | 64 GPUs | fix: | --sequence-length | --batch-size | --nproc"
    ),
    "--preset llama-3-8b --sequence-length 0": "sequence_length | '0' | at least 1 | fix: ",
    "--preset llama-3-8b --sequence-length 4096 --nproc 100000": "--nproc 100000 | allowed: 1 to 65536",
    "--preset llama-3-8b --sequence-length 4096 --hardware h20": "'h20' | 'h200'",
    "--preset llama-3-8b --sequence-length 4096 --hardware gone.toml": "gone.toml | cannot be read",
    "--preset llama-3-8b --sequence-length 4096 --recompute blok": "'blok' | 'block' | known: ",
    "--preset llama-3-8b --sequence-length 4096 --recompute block+first-32": (
        "'block+first-32' | 32 layers | fix: block"
    ),
    "--preset llama-3-8b --sequence-length 4096 --parallel.zero_level 1": "--parallel.zero_level | '1'",
    "--preset llama-3-8b --sequence-length 4096 --parallel.zero_group 4": "--parallel.zero_group | '4' | world | node",
    "--preset llama-3-8b --sequence-length 4096 --tensor-parallel 3": "--tensor-parallel 3",
    "--preset llama-3-8b --sequence-length 4096 --tensor-parallel x": "whole numbers",
    "--preset llama-3-8b --sequence-length 4096 --nproc 4 --data-parallel 3": (
        "--data-parallel 3 | 4 GPUs | --batch-size 3 | 1 x 1, 1 x 2, 1 x 4 | fix: --data-parallel 1"
    ),
    "--preset llama-3-8b --longest --nproc 2 --data-parallel 1 --sequence-parallel 4": (
        "--data-parallel 1 --sequence-parallel 4 | 2 GPUs | 1 x 1, 1 x 2 | --sequence-parallel 2"
    ),
    "--preset llama-3-8b --sequence-length 4096 --sequence-parallel x": "--sequence-parallel x | whole numbers",
    "--preset llama-3-8b --sequence-length 4096 --generate --data-parallel 2": "--generate | --data-parallel",
    "--preset llama-3-8b --sequence-length 4096 --strategy ring": "--strategy | bmburst train | fix: leave it out",
    "--preset llama-3-8b --sequence-length 4096 --optimizer.lr=1": "--optimizer.lr | bmburst train | fix: leave it out",
    "--preset llama-3-8b --sequence-length 4096 --sequence-lenght 8": "did you mean '--sequence-length'",
    "--preset llama-3-8b --sequence-length 4096 --batch-size 3 --micro-batch-size 2": "3 | 2",
    "--preset llama-3-8b --sequence-length 4096 --nproc 3 --pipeline-parallel 2,4": (
        "--pipeline-parallel 2,4 | 3 GPUs | fix: --pipeline-parallel 1"
    ),
    "--preset llama-3-8b --sequence-length 4096 --nproc 8 --pipeline-parallel 3,4 --batch-size 2": (
        "--pipeline-parallel 3,4 | fix: --pipeline-parallel 1, or --batch-size 4"
    ),
    "--preset llama-3-8b --sequence-length 4096 --output gone/plan.png": (
        "--output gone/plan.png | no such folder | fix: "
    ),
    "--preset llama-3-8b --sequence-length 4096 --output plan.pdf": "--output plan.pdf | .png",
    "--preset llama-3-8b --sequence-length 4096 --dtype int8": "dtype | 'int8' | bfloat16",
    "--preset llama-3-8b --sequence-length 4096 --ways 0": "--ways 0",
    "--preset llama-3-8b --sequence-length 4096 --pack trees": "--pack trees | --shared-prompt | --answers | fix: ",
    "--preset llama-3-8b --sequence-length 4096 --answers 3": "--answers 3 | fix: add --shared-prompt",
    "--preset llama-3-8b --sequence-length 4096 --shared-prompt 4095": "4095 | 4096 | 1 to 4094 | --sequence-length",
    "--preset llama-3-8b --sequence-length 4096 --shared-prompt 9 --answers 1": "--answers 1 | at least 2",
    "--preset llama-3-8b --sequence-length 4096 --shared-prompt 9 --answers 3 --dpo.beta 1": "3 | chosen | rejected",
    "--preset llama-3-8b --sequence-length 4096 --shared-prompt 9 --pack stream": "--pack trees | stream",
    "--preset llama-3-8b --longest --shared-prompt 9": "--longest | --shared-prompt",
    "--preset llama-3-8b --sequence-length 4096 --tensor-parallel 1 --recompute block-keep-attention:0.3": (
        "--recompute block-keep-attention:0.3 | zigzag | fix: --recompute block-keep-attention"
    ),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_input_is_refused_in_a_few_lines(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan(*words.split()) == 2
    says(capsys.readouterr().err.strip(), REFUSALS[words])


def test_any_number_of_gpus_has_a_way_that_leaves_none_without_a_token():
    assert all(each.ulysses_degree in (1, 7) for each in candidates(Task(model=ODD, sequence=4096, gpus=7)))
    with refused("--sequence-length 3", "--batch-size 1", "64 GPUs", "fix: "):
        candidates(task(sequence=3, gpus=64, nodes=8))
    for gpus, batch in product((1, 2, 3), (1, 5)):
        assert candidates(task(gpus=gpus, batch=batch))


@pytest.mark.parametrize("more", [(), ("--micro-batch-size", "2")], ids=["alone", "micro-batch"])
def test_a_pipeline_has_the_batch_that_training_gives_it(more, capsys):
    """A micro-batch for each stage; all degrees that are tried have that of the largest."""
    asked = "plan --preset llama-3-8b --sequence-length 4K --nproc 4 --ways 1 --pipeline-parallel"
    micro = int(more[1]) if more else 1
    trained = resolve((), {"parallel.pipeline_parallel": "4", "micro_batch_size": str(micro)})
    for degrees in ("4", "1,2,4"):
        assert main([*asked.split(), degrees, *more]) == 0
        says(capsys.readouterr().out.splitlines()[0], f"4K tokens x {trained.batch_size} a step")


@pytest.mark.parametrize(
    ("degrees", "batch", "meshes"),
    [
        ("", 1, {(1, 4), (1, 2), (1, 1)}),
        ("--data-parallel 2", 2, {(2, 2), (2, 1)}),
        ("--sequence-parallel 1,4", 1, {(1, 4), (1, 1)}),
        ("--parallel.data_parallel 1,4", 4, {(1, 4), (1, 2), (1, 1), (4, 1)}),
    ],
)
def test_only_the_degrees_that_are_asked_for_are_tried(degrees, batch, meshes, capsys):
    """Without a batch, a step has a sequence for each group, as in training. Tensor parallelism takes the rest."""
    asked = "plan --preset llama-3-8b --sequence-length 8K --nproc 4 --json"
    assert main([*asked.split(), *degrees.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["task"]["batch"] == batch
    assert {(way["mesh"]["data"], way["mesh"]["sequence"]) for way in found["ways"]} == meshes
