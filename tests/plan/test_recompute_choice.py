"""What "auto" takes: the fastest policy that fits, the same on all ranks, said once."""

from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from bmburst.attention.call import head_shapes
from bmburst.blocks.presets import PRESETS
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.memory import HOST_SHARE, memory_of, reserved_memory
from bmburst.plan.presentation import options
from bmburst.plan.search import choose_recompute, predict, search, with_usable_memory
from bmburst.plan.ways import first_layer_candidates, mlp_output_candidates, with_attention_choice
from bmburst.recompute.policy import AUTO, POLICIES, Policy
from bmburst.schedule.cost import Placement
from bmburst.schedule.hardware import HOST, hardware_like, load_hardware
from bmburst.schedule.layout import padded_layout
from bmburst.schedule.mask import Causal, SlidingWindow
from bmburst.schedule.strategy import choose_strategy
from bmburst.train import memory_plan
from bmburst.train.config import OptimizerConfig, ParallelConfig, TrainConfig
from tests.distributed.threads import mesh_of, run_ranks
from tests.refusals import refused

H200 = load_hardware("h200")
GIB = 2**30


def way(sequence=1 << 20, gpus=8, **more):
    task = Task(model=PRESETS["llama-3-8b"], sequence=sequence, gpus=gpus, **more)
    return Candidate(task=task, ulysses_degree=gpus)


def peak(of, policy):
    return predict(replace(of, recompute=policy), H200).memory.total - reserved_memory(of.task, H200)


def test_the_more_is_free_the_faster():
    asked = way()
    taken, seconds = [], []
    for gib in (60, 70, 80, 100, 140, 300, 2000):
        choice = choose_recompute(asked, H200, gib * GIB, layout="zigzag")
        taken.append(choice.value)
        seconds.append(predict(replace(asked, recompute=choice.value), H200).seconds)
        fits = peak(asked, choice.value) <= 0.95 * gib * GIB
        assert fits == ("the fastest that fits" in choice.message)
        assert choice.value in choice.message and "\n" not in choice.message
        for other in POLICIES if fits else ():  # no other that fits is faster
            if peak(asked, other) <= 0.95 * gib * GIB:
                found = predict(replace(asked, recompute=other), H200)
                assert found.seconds >= seconds[-1] * (1 - 1e-3)
                assert "offload" not in choice.value or found.memory.in_host or found.seconds > seconds[-1]
    assert taken[-1] == "none" and len(set(taken)) > 2
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in pairwise(seconds))  # closer ones are alike


@pytest.mark.parametrize(("model", "sequence", "gpus"), [("llama-3-8b", 1 << 15, 2), ("minicpm-2b", 1 << 18, 4)])
@pytest.mark.parametrize("name", ["block", "block-keep-attention"])
def test_between_two_policies_the_fewest_layers_that_fit(name, model, sequence, gpus):
    """One layer fewer does not fit, one more is slower, and both ends are taken where they are right."""
    asked = replace(way(sequence, gpus), task=replace(way(sequence, gpus).task, model=PRESETS[model]))
    layers, names = PRESETS[model].num_layers, ["none", name]
    least, most = (peak(asked, policy) / 0.95 for policy in (f"{name}+first-{layers - 1}", "none"))
    assert peak(asked, name) / 0.95 < least < most
    assert choose_recompute(asked, H200, most * 1.0001, layout="zigzag", policies=names).value == "none"
    assert choose_recompute(asked, H200, least * 0.9999, layout="zigzag", policies=names).value == name
    taken = []
    for part in (0.0001, 0.02, 0.3, 0.5, 0.77, 0.9999):
        free = least + part * (most - least)
        choice = choose_recompute(asked, H200, free, layout="zigzag", policies=names)
        policy = Policy.parse(choice.value)
        taken.append(policy.layers)
        assert replace(policy, layers=None).name == name
        assert choice.message.startswith(f"recompute: {choice.value} (the fastest that fits: ")
        assert "\n" not in choice.message
        assert peak(asked, choice.value) <= 0.95 * free
        fewer = "none" if policy.layers == 1 else f"{name}+first-{policy.layers - 1}"
        assert peak(asked, fewer) > 0.95 * free
        more = name if policy.layers == layers - 1 else f"{name}+first-{policy.layers + 1}"
        slower, own = (predict(replace(asked, recompute=each), H200).seconds for each in (more, choice.value))
        assert slower > own
    assert taken[0] == layers - 1 and taken[-1] == 1 and taken == sorted(taken, reverse=True)


def test_first_layers_are_tried_between_policies_that_are():
    free = 0.5 * (peak(way(), "block") + peak(way(), "none"))
    assert "+first-" in choose_recompute(way(), H200, free, layout="zigzag").value
    for names in (["none", "block-keep-attention:0.5"], ["block", "block-keep-attention"], ["none"]):
        assert choose_recompute(way(), H200, free, layout="zigzag", policies=names).value in names
    alone = replace(way(), task=replace(way().task, model=replace(PRESETS["llama-3-8b"], num_layers=1)))
    two = ["none", "block"]
    assert choose_recompute(alone, H200, peak(alone, "none"), layout="zigzag", policies=two).value == "block"


@pytest.mark.parametrize("name", ["block-keep-attention", "block"])
def test_first_layers_go_to_the_host_only_where_they_must(name):
    """Where the policy fits for some of the layers it is taken; below that, the same with an offload, of the fewest."""
    asked = replace(way(1 << 15, 2), task=replace(way(1 << 15, 2).task, model=PRESETS["llama-3-8b"]))
    offloads = [each for each in POLICIES if each.startswith(f"{name}+")]
    for free, is_hosted in ((1.0001, False), (0.9999, True)):
        room = with_usable_memory(H200, free * peak(asked, f"{name}+first-31") / 0.95, asked.task)
        found = first_layer_candidates(asked, room, ["none", name, *offloads])
        wanted = offloads if is_hosted else [name]
        assert [each.recompute.partition("+first-")[0] for each in found] == wanted
        for each in found:
            count = each.policy.layers
            assert memory_of(each, room).fits and (count < 31) is is_hosted
            fewer = each.recompute.replace(f"first-{count}", f"first-{count - 1}")
            assert not memory_of(replace(each, recompute=fewer), room).fits
        poor = replace(room, host_memory=GIB)
        assert len(first_layer_candidates(asked, poor, ["none", name, *offloads])) == 1 - is_hosted


def test_outputs_of_an_mlp_go_to_the_host_where_they_save_time():
    """On two H200s at 128K: of all layers that recompute, of as many as the host has room for, or of none."""
    asked, policies = way(1 << 17, 2), list(POLICIES)

    def taken(host=256, *, of=asked, names=policies):
        room = with_usable_memory(
            replace(H200, host_memory=host * GIB), H200.memory - reserved_memory(of.task, H200), of.task
        )
        some = first_layer_candidates(of, room, names)
        found = mlp_output_candidates(of, room, names, some)
        for each in found:
            policy = each.policy
            without = replace(each, recompute=replace(policy, offloads_mlp=0).name)
            assert memory_of(each, room).fits and predict(each, room).seconds < 0.99 * predict(without, room).seconds
            more = replace(each, recompute=replace(policy, offloads_mlp=policy.offloads_mlp + 1, layers=None).name)
            assert policy.offloads_mlp == (policy.layers or 32) or not memory_of(more, room).fits
        return {each.recompute for each in found}

    keep = "block-keep-attention+offload-mlp-first"
    assert taken() == {f"{keep}-32", f"{keep}-29+first-29"}
    assert taken(128) == {f"{keep}-16", f"{keep}-16+first-29"}
    assert not taken(120)  # 15 of 32 layers
    assert not taken(names=["none", "block", "block-keep-attention"])  # nothing may go to the host
    assert not taken(512, of=way(1 << 19, 8))  # eight GPUs of a host
    assert not taken(of=replace(asked, offload=Offload.OPTIMIZER)) and not taken(of=way(1 << 14, 2))
    assert not taken(of=replace(way(1 << 17, 2), tensor=2, ulysses_degree=1))
    choice = choose_recompute(asked, H200, H200.memory - reserved_memory(asked.task, H200), layout="zigzag")
    assert choice.value == f"{keep}-29+first-29" and "203.0 GiB of each host's" in choice.message


def test_the_host_must_have_room_too():
    asked = way()
    free = 0.5 * (peak(asked, "block-keep-attention+offload-all") + peak(asked, "block")) / 0.95
    rich = choose_recompute(asked, H200, free, layout="zigzag")
    assert "offload" in rich.value and "of each host's" in rich.message
    poor = choose_recompute(asked, replace(H200, host_memory=GIB), free, layout="zigzag")
    assert "offload" not in poor.value and "+every-" in poor.value and "fastest" in poor.message
    plain = [name for name in POLICIES if name != "block-keep-attention"]  # without segments
    poor = choose_recompute(asked, replace(H200, host_memory=GIB), free, layout="zigzag", policies=plain)
    assert "offload" not in poor.value and "none fits" in poor.message
    moved = replace(way(), offload=Offload.OPTIMIZER)
    beside = choose_recompute(moved, replace(H200, host_memory=100 * GIB), free, layout="zigzag")
    assert "offload" not in beside.value  # AdamW's state takes it


def test_what_hosts_have_left_keeps_attention():
    asked = replace(way(gpus=2), offload=Offload.WEIGHTS)
    found = {}
    for gib in (200, 250, 400, 700):
        room = replace(H200, host_memory=float(gib * GIB))
        name = choose_recompute(asked, room, 138 * GIB, layout="zigzag").value
        found[gib] = Policy.parse(name), predict(replace(asked, recompute=name), room)
        assert found[gib][1].memory.in_host <= HOST_SHARE * room.host_memory
    hosted = {gib: policy.offloads_attention for gib, (policy, _) in found.items()}
    assert hosted[200] == 0 and hosted[250] > 0 and hosted[400] > 0
    assert found[400][0].attention == 1, "attention of all layers"
    seconds = [each.seconds for _, each in found.values()]
    assert seconds[0] > 1.03 * seconds[1] and seconds[1] > 1.015 * seconds[2] and seconds[2] >= seconds[3]
    policy, _ = found[250]
    assert policy.offloads_first == 32 and policy.keeps_last + policy.offloads_attention > 32


def test_where_nothing_fits_it_takes_what_needs_least():
    choice = choose_recompute(way(), H200, 10 * GIB, layout="zigzag")
    assert "none fits" in choice.message
    assert peak(way(), choice.value) == min(peak(way(), name) for name in POLICIES)


def test_layouts_that_share_no_end_are_left_out():
    names = ["block-keep-attention:0.5", "block"]
    free = 2000 * GIB
    assert choose_recompute(way(), H200, free, layout="zigzag", policies=names).value == names[0]
    assert choose_recompute(way(), H200, free, layout="contiguous", policies=names).value == "block"
    assert choose_recompute(way(gpus=1), H200, free, layout="contiguous", policies=names).value == names[0]


@pytest.mark.parametrize(
    ("strategy", "heads", "wanted"),
    [
        ("auto", None, (8, "none")),
        ("heads", None, (8, "none")),
        ("gather", None, (1, "gather")),
        ("kv", None, (1, "ring")),
        ("burst", None, (1, "ring")),
        ("heads+ring", 4, (4, "ring")),
        ("auto", 2, (2, None)),
    ],
)
def test_attention_is_spread_as_it_is_named(strategy, heads, wanted):
    found = with_attention_choice(way(), strategy, heads, H200)
    assert found.ulysses_degree == wanted[0] and wanted[1] in (None, found.outer)
    assert strategy not in ("kv", "burst") or found.ring_tensors == {"kv": "kv", "burst": "q"}[strategy]


LARGE = replace(H200, memory=1e15, host_memory=1e16)  # memory rules nothing out
PLACES = [(gpus, 1) for gpus in (1, 2, 3, 4, 5, 6, 8, 12, 16)] + [(gpus, 2) for gpus in (2, 4, 6, 8, 12, 16)]
HEADS = [(32, 32), (32, 8), (40, 40), (12, 4), (28, 4), (7, 7)]
GRID = [
    *((*place, *heads, tokens, None) for place, heads, tokens in product(PLACES, HEADS, (8192, 65536, 300000))),
    *((*place, *heads, 65536, window) for place, heads, window in product(PLACES, HEADS[::2], (1024, 16384))),
]


@pytest.mark.parametrize(("gpus", "nodes"), PLACES)
def test_what_the_planner_names_best_is_what_attention_does(gpus, nodes):
    """And so is what a run is priced by, and what the options of the printed command ask for."""
    cases = [case for case in GRID if case[:2] == (gpus, nodes)]
    assert len(GRID) >= 300 and len(cases) == 24
    for _, _, heads, kv_heads, tokens, window in cases:
        model = replace(
            PRESETS["llama-3-8b"], hidden_size=heads * 128, num_heads=heads, num_kv_heads=kv_heads, head_dim=128,
            num_layers=1, sliding_window=window, max_position_embeddings=1 << 20,
        )  # fmt: skip
        asked = Task(model=model, sequence=tokens, gpus=gpus, nodes=nodes)
        best, *others = search(asked, LARGE, recompute=["block"], zero=[3], tensor=[1])
        way, layout = best.candidate, padded_layout("zigzag", gpus, tokens)
        q, k = (torch.empty(1, layout.tokens, n, 128, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
        mask = Causal() if window is None else SlidingWindow(window)
        placement = Placement("peer" if nodes == 1 else "nccl", nodes)

        def taken(name, degree=None):
            there = head_shapes(layout, q, k, k), tokens, mask, placement  # noqa: B023
            return choose_strategy(name, *there, LARGE, degree)

        own = taken("auto")
        named = (own.ulysses_degree, "none" if own.ulysses_degree == gpus else own.outer)
        assert (way.ulysses_degree, way.outer) == named, (asked, own)
        assert way.sizes.strategy.ring_tensors == own.ring_tensors or way.outer in ("none", "gather")
        assert way.problem(LARGE).in_units(own) == own
        run = with_attention_choice(Candidate(task=asked, outer="ring"), "auto", None, LARGE)
        assert (run.ulysses_degree, run.outer) == named
        words = dict(pairwise(options(way)))
        again = taken(words["--strategy"], int(words["--head-parallel"]) if "--head-parallel" in words else None)
        assert (again.ulysses_degree, again.outer) == (own.ulysses_degree, own.outer)
        fastest = min((best, *others), key=lambda each: each.seconds)
        assert best.seconds <= fastest.seconds * 1.02


def config(**changes):
    return TrainConfig(preset="llama-tiny", sequence_length=4096, **changes)


def decide(asked, free, host=64 * GIB):
    """Return what each rank takes; `free` is by rank, the free memory of the host that of all."""
    size = len(free)

    def body(comm):
        mesh = mesh_of(comm)
        return memory_plan.recompute_for(asked, mesh, size, memory_plan.RankMemory(free=free[comm.rank], host=host))

    return run_ranks(size, body)


def test_all_ranks_take_what_fits_the_fullest_and_one_says_so(capsys):
    asked = config(recompute=AUTO)
    roomy = decide(asked, [64 * GIB, 64 * GIB])
    assert roomy == ["none", "none"]
    said = capsys.readouterr().err
    assert said.startswith("recompute: none (the fastest that fits: ") and said.count("\n") == 1
    tight = decide(asked, [GIB // 8, 64 * GIB])
    assert tight[0] == tight[1] != "none" and "offload" not in tight[0]  # without GPUs it would move nothing away


def test_a_run_takes_what_lies_between(capsys):
    asked, found = config(recompute=AUTO), set()
    for mib in range(100, 300, 20):
        names = decide(asked, [mib * GIB / 1024, 64 * GIB])
        assert names[0] == names[1] and capsys.readouterr().err.startswith(f"recompute: {names[0]} (")
        asked.replace(recompute=names[0])  # is a policy of this model
        found.add(names[0])
    assert "none" in found and any("+first-" in name for name in found), found


def test_unlike_ranks_decide_by_the_first(monkeypatch, capsys):
    """By its GPU and by the ranks of its host: two policies in one run would wait for each other."""
    asked, names, decided = config(recompute=AUTO), {0: "NVIDIA A100-SXM4-80GB", 1: "NVIDIA H200", 2: "a board"}, []
    real = memory_plan.planned

    def spy(config, ranks, nodes, hardware):
        decided.append((ranks, nodes, hardware.name))
        return real(config, ranks, nodes, hardware)

    def body(comm):
        mesh = mesh_of(comm)
        cuda = SimpleNamespace(
            is_available=lambda: True,
            get_device_name=lambda: names[comm.rank],
            memory_reserved=lambda: 2 * GIB,
            memory_allocated=lambda: GIB,
            mem_get_info=lambda: ((75 if comm.rank else 39) * GIB, 80 * GIB),
        )
        local_size = 1 + (comm.rank > 0)
        return memory_plan.recompute_for(asked, mesh, local_size, memory_plan.RankMemory.now(local_size, cuda))

    monkeypatch.setattr(memory_plan, "planned", spy)
    assert len(set(run_ranks(3, body))) == 1
    said = capsys.readouterr().err
    assert "of 40.0 GiB" in said and "other programs have 39.0 GiB" in said
    assert decided == [(3, 3, "NVIDIA A100")] * 3


def test_without_gpus_recompute_is_priced_with_attentions_machine(monkeypatch):
    """`recompute auto` prices the attention that ranks without GPUs run: same machine, transport and strategy."""
    planned, real = [], memory_plan.planned

    def spy(config, ranks, nodes, hardware):
        planned.append((hardware, real(config, ranks, nodes, hardware)))
        return planned[-1][1]

    monkeypatch.setattr(memory_plan, "planned", spy)
    host = hardware_like(HOST)
    for size in (2, 4):
        asked = config(recompute=AUTO)
        decide(asked, [64 * GIB] * size)
        hardware, taken_way = planned[-1]
        assert replace(hardware, host_memory=host.host_memory) == host
        assert taken_way.placement == Placement("gloo", 1, within="gloo")
        own = choose_strategy("auto", taken_way.shapes, 4096, Causal(), Placement("gloo", 1), host)
        assert (taken_way.sizes.strategy.ulysses_degree, taken_way.sizes.strategy.outer) == (
            own.ulysses_degree,
            own.outer,
        )
    assert memory_plan.DeviceMemory.now().device == HOST


def test_what_is_named_is_taken_if_hosts_have_room():
    assert decide(config(recompute="block"), [1, 1]) == ["block"] * 2
    offload = config(recompute="block+offload", optimizer=OptimizerConfig(offload=True))
    assert decide(offload, [1, 1]) == ["block+offload"] * 2
    with refused("recompute block+offload", "optimizer.offload", "16.1 MiB", "host", "921.6 KiB", "10% | in reserve"):
        decide(offload, [1, 1], 1 << 20)
    with refused("block+offload-first-1", "921.6 KiB", "in reserve"):
        decide(config(recompute="block+offload-first-1"), [1, 1], 1 << 20)
    hardware = hardware_like("")
    needed = memory_of(memory_plan.planned(offload, 2, 1, hardware), hardware).in_host
    for share, fits in ((1.01, False), (1.01 / HOST_SHARE, True)):  # what is free is not all for the run
        host = int(share * needed)
        if fits:
            assert decide(offload, [1, 1], host) == ["block+offload"] * 2
        else:
            with refused("recompute block+offload", "on each host", "10% | in reserve"):
                decide(offload, [1, 1], host)
    assert decide(config(recompute="block"), [1, 1]) == ["block"] * 2


def test_kernels_of_an_unknown_machine():
    assert hardware_like("a board").name == H200.name
    striped = config(recompute=AUTO, parallel=ParallelConfig(layout="striped", strategy="double-ring"))
    assert set(decide(striped, [GIB, GIB])) <= set(POLICIES)
