"""What attention refuses: on every rank, in one clear message, before any work starts."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

import bmburst
from bmburst.comm.local import run_ranks
from bmburst.errors import UserError
from tests.attention.test_burst_attention import zeros


class Standing(torch.Tensor):
    """As torch's DTensor, what other tensors are hidden in."""

    def __tensor_flatten__(self):
        return [], None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "casual"}, "unknown mask 'casual'; did you mean 'causal'\\?\nknown: causal, full"),
        ({"mask": ["causal"]}, "a tuple of one for each sample, got a list of 1"),
        (
            {"layout": "stripe"},
            "unknown layout 'stripe'; did you mean 'striped'\\?\nknown: balanced, contiguous, striped, zigzag",
        ),
        ({"layout": {"zigzag"}}, "unknown layout"),
        (
            {"kernel": "cpuu"},
            "unknown kernel 'cpuu'; did you mean 'cpu'\\?\nknown: auto, cpu, cudnn, fa2, fa3, fa4, reference, torch",
        ),
        ({"kernel": None}, "unknown kernel 'None'"),
        ({"kernel": "torch"}, "kernel 'torch' runs on NVIDIA GPUs only"),
        (
            {"strategy": "brust"},
            "unknown strategy 'brust'; did you mean 'burst'\\?\nknown: auto, burst, double-ring, gather, heads",
        ),
        ({"transport": "gloom"}, "unknown transport 'gloom'; did you mean 'gloo'\\?\nknown: auto, gloo, nccl, peer"),
        ({"transport": "nccl"}, "transport 'nccl' was asked for, but the group's tensors move by threads"),
        ({"length": 9}, "length is 9, but 2 ranks x 4 local tokens hold 1 to 8"),
        ({"length": 0}, "length is 0"),
        ({"length": 8.0}, "length must be a whole number, got 8.0"),
        ({"length": "8"}, "length must be a whole number, got '8'"),
        ({"length": True}, "length must be a whole number, got True"),
        ({"scale": True}, "scale must be a positive number, got True"),
        ({"deterministic": 1}, "deterministic must be a bool, got 1\nallowed: True or False"),
        ({"scale": 0.0}, "scale must be a positive number"),
        ({"scale": -0.5}, "scale must be a positive number, got -0.5"),
        ({"scale": float("nan")}, "scale must be a positive number"),
        ({"scale": float("inf")}, "scale must be a positive number"),
        ({"scale": "0.5"}, "scale must be a positive number, got '0.5'"),
        ({"scale": 10**400}, "scale must be a positive number, got 1000"),
        ({"scale": Fraction(1, 10**400)}, r"scale must be a positive number, got Fraction\(1, 1000"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
def test_unknown_values_are_refused_on_every_rank(options, message, wrong_ranks):
    def body(comm):
        with pytest.raises(UserError, match=message) as caught:
            bmburst.burst_attention(*zeros(comm), group=comm, **(options if comm.rank in wrong_ranks else {}))
        assert len(str(caught.value).splitlines()) <= 3

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q must be \[batch, local_tokens, heads, head_dim\], got shape \[4, 2, 8\]"),
        (lambda q, k, v: (q.numpy(), k, v), "q must be a torch tensor, got ndarray"),
        (lambda q, k, v: (q, k, v.tolist()), "v must be a torch tensor, got list"),
        (lambda q, k, v: (q.long(), k, v), "share one floating-point dtype of at least 16 bits, got torch.int64"),
        (lambda q, k, v: [t.to(torch.float8_e4m3fn) for t in (q, k, v)], "of at least 16 bits, got torch.float8"),
        (lambda q, k, v: (q, k.to("meta"), v), "must be on one device, got cpu, meta and cpu\nfix: "),
        (lambda q, k, v: [t.to("meta") for t in (q, k, v)], "q must hold numbers, got a meta tensor .*\nfix: "),
        (lambda q, k, v: (q, k.double(), v), "share one floating-point dtype"),
        (lambda q, k, v: (q, k, v[:, :, :1]), "k and v must have the same shape, got .*\nfix: "),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "local_tokens and head_dim must be equal"),
        (lambda q, k, v: (q[:, :, :1], k, v), "1 query heads cannot share 2 key/value heads"),
        (lambda q, k, v: (q[:, :3], k[:, :3], v[:, :3]), "needs a multiple of 2 tokens a rank, got 3"),
        (lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), "got shape"),
        (lambda q, k, v: (q, k.as_subclass(Standing), v), "k must be a plain tensor, got a Standing"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
def test_bad_tensors_are_refused_on_every_rank(change, message, wrong_ranks):
    def body(comm):
        tensors = zeros(comm)
        with pytest.raises(UserError, match=message) as caught:
            bmburst.burst_attention(*(change(*tensors) if comm.rank in wrong_ranks else tensors), group=comm)
        assert len(str(caught.value).splitlines()) <= 3

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, k, v: (None, k, v), "q must be a torch tensor, got NoneType"),
        (lambda q, k, v: (q.sum(), k, v), r"got shape \[\]"),
        (lambda q, _, v: (q, None, v), "k must be a torch tensor, got NoneType"),
        (lambda q, k, v: (q, *(torch.cat((t, t)) for t in (k, v))), r"k is \[4, 4, 2, 8\] but q is \[2, 4, 2, 8\]"),
        (lambda q, k, v: (q, k[:1], v[:1]), r"k is \[1, 4, 2, 8\] but q is \[2, 4, 2, 8\]"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
def test_bad_tensors_are_refused_before_samples_are_parted(change, message, wrong_ranks):
    """With a mask for each sample: the inputs as they were given, not what becomes of a sample's part."""

    def body(comm):
        tensors = [torch.cat((t, t)) for t in zeros(comm)]
        given = change(*tensors) if comm.rank in wrong_ranks else tensors
        with pytest.raises(UserError, match=message) as caught:
            bmburst.burst_attention(*given, mask=("causal", "full"), group=comm)
        assert len(str(caught.value).splitlines()) <= 3

    run_ranks(2, body)


@pytest.mark.parametrize("group", [2, "world", SimpleNamespace(sequence=None)])
def test_what_is_no_group_is_refused(group):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UserError, match=r"(?s)process group.*mesh.sequence.*mesh.get_group") as caught:
        bmburst.burst_attention(q, q, q, group=group)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("function", [bmburst.shard, bmburst.unshard])
def test_what_only_stands_for_tensors_is_not_cut(function):
    with pytest.raises(UserError, match=r"must be a plain tensor, got a Standing\n.* its to_local\(\)"):
        function(torch.zeros(1, 8, 2).as_subclass(Standing))


SAME = "pass the same value on every rank"


def test_ranks_that_disagree_are_not_shown_what_nobody_set():
    def body(comm):
        q = torch.zeros(1, 64, 4, 32)
        with pytest.raises(UserError) as caught:  # an exchange of heads, whose pace hangs on the length
            bmburst.burst_attention(q, q, q, group=comm, strategy="heads", length=128 - comm.rank)
        told = [f"rank {rank}: burst_attention length {length}" for rank, length in enumerate((128, 127))]
        assert str(caught.value).splitlines() == [f"the ranks of the group disagree; fix: {SAME}", *told]

    run_ranks(2, body)


def test_ranks_that_disagree_are_refused_on_every_rank():
    def body(comm):
        for name, values in (
            ("mask", ("causal", "full")),
            ("layout", ("zigzag", "striped")),
            ("length", (7, 8)),
            ("scale", (1.0, 2.0)),
            ("kernel", ("cpu", "reference")),
            ("strategy", ("kv", "burst")),  # which are decided on by what travels
        ):
            with pytest.raises(UserError) as caught:
                bmburst.burst_attention(*zeros(comm), group=comm, **{"strategy": "kv", name: values[comm.rank]})
            shown = ("strategy.travellers", ("kv", "q")) if name == "strategy" else (name, values)
            told = [f"rank {rank}: burst_attention {shown[0]} {value}" for rank, value in enumerate(shown[1])]
            assert str(caught.value).splitlines() == [f"the ranks of the group disagree; fix: {SAME}", *told]
        with pytest.raises(UserError, match=r"rank 1: burst_attention q float32\[1, 6, 2, 8\]"):
            bmburst.burst_attention(*zeros(comm, tokens=4 + 2 * comm.rank), group=comm)
        inputs = [t.requires_grad_(comm.rank == 1) for t in zeros(comm)]  # a backward that only one rank would run
        with pytest.raises(UserError, match=r"rank 1: .* with gradient"):
            bmburst.burst_attention(*inputs, group=comm)
        with torch.no_grad():
            bmburst.burst_attention(*inputs, group=comm)

    run_ranks(2, body)


def test_meta_tensors_are_refused():
    """They have shapes and no numbers."""
    q, ids = torch.zeros(1, 4, 2, 8, device="meta"), torch.zeros(1, 8, dtype=torch.int64, device="meta")
    cut = bmburst.SequenceShard.cut(8, layout="zigzag", size=2, rank=0)
    for call in (
        lambda: bmburst.burst_attention(q, q, q),
        lambda: bmburst.shard(ids),
        lambda: bmburst.unshard(ids),
        lambda: cut.take(ids),
        lambda: cut.batch(ids),
        lambda: bmburst.Documents.from_cu_seqlens(ids[0]),
    ):
        with pytest.raises(UserError, match="meta") as caught:
            call()
        assert len(str(caught.value).splitlines()) <= 3
