"""Decode attention against its definition in fp64: the twin in plain torch, and Triton, interpreted or on a GPU."""

import pytest
import torch

from bmburst_ops import triton_decode
from bmburst_ops.decode import KERNELS, attend_visible, decode_attention, merge_decode, runs_triton, visible_tokens
from bmburst_ops.errors import KernelError
from bmburst_ops.flash.triton import TritonKernel
from tests.ops.another_machine import AnotherMachine
from tests.pairs import in_turn, long
from tests.refusals import refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3
LENGTHS = (0, 1, 15, 16, 17, 31, 33, 50)  # the interpreter's block has 16 tokens
STARTS = (0, 1, 3, 15, 16, 40, -7, 17)  # the second and sixth see nothing, the seventh has a window of more than all
# Of the norm. Triton rounds the weights of 16-bit values to their dtype, as FlashAttention does.
ERRORS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


class Case:
    """Queries and a cache that is NaN wherever it is not visible, and the definition's results in fp64 on the CPU."""

    def __init__(self, heads, kv_heads, head_dim, dtype, lengths=LENGTHS, starts=None, capacity=None, scale=SCALE):
        draws = torch.Generator().manual_seed(heads * 1000 + head_dim)
        capacity, batch = capacity or max(lengths), len(lengths)
        self.spans = [(max(0, start), stop) for start, stop in zip(starts or [0] * batch, lengths, strict=True)]
        self.q = torch.randn(batch, heads, head_dim, generator=draws).to(dtype)
        whole = torch.randn(2, batch, capacity, kv_heads, head_dim, generator=draws).to(dtype)
        self.cache = torch.full_like(whole, torch.nan)
        for i, (start, stop) in enumerate(self.spans):
            self.cache[:, i, start:stop] = whole[:, i, start:stop]
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
        self.scale = scale
        self.out, self.lse = define(self.q, *self.cache, self.spans, scale)

    def run(self, kernel, cache=None, q=None, **options):
        """Return the kernel's results for the same numbers, also of a cache that lies in another way."""
        device = DEVICE if kernel == "triton" else "cpu"
        keys, values = self.cache.to(device) if cache is None else cache
        starts = None if self.starts is None else self.starts.to(device)
        q = self.q.to(device) if q is None else q
        options = {"starts": starts, "scale": self.scale, "kernel": kernel} | options
        return decode_attention(q, keys, values, self.lengths.to(keys.device), **options)

    def check(self, out, lse):
        """Compare the output, which is in the dtype of the queries, and the log-sum-exp."""
        dtype = self.q.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert out.dtype == dtype and lse.dtype == wide
        assert norm(out.double().cpu() - self.out) <= ERRORS[dtype] * norm(self.out)
        torch.testing.assert_close(lse.double().cpu(), self.lse, rtol=ERRORS[wide], atol=5 * ERRORS[wide])
        empty = torch.tensor([start >= stop for start, stop in self.spans])
        assert not out.cpu()[empty].any() and (lse.cpu()[empty] == -torch.inf).all()


def define(q, keys, values, spans, scale):
    """Attention of each head by itself, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    group = q.shape[1] // keys.shape[2]
    for i, (start, stop) in enumerate(spans):
        for head in range(q.shape[1]) if start < stop else ():
            k, v = (t[i, start:stop, head // group].double() for t in (keys, values))
            scores = k @ q[i, head].double() * scale
            lse[i, head] = scores.logsumexp(0)
            out[i, head] = scores.softmax(0) @ v
    return out, lse


def norm(tensor):
    return tensor.norm().item()


@pytest.mark.parametrize("group", [*range(1, 17), 23])
def test_twin_of_every_group(group):
    for starts in (None, STARTS):
        for dtype in (torch.float64, torch.float32):
            case = Case(2 * group, 2, 8, dtype, starts=starts)
            case.check(*case.run("reference"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_twin_rounds_once(head_dim, dtype):
    """It computes in fp32: the output is the definition's in the dtype, but for ties that fp32 decides."""
    case = Case(4, 2, head_dim, dtype, starts=STARTS)
    out, lse = case.run("reference")
    case.check(out, lse)
    wide, same_lse = case.run("reference", out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(lse, same_lse) and torch.equal(wide.to(dtype), out)
    assert norm(wide - case.out) < ERRORS[torch.float32] * norm(case.out)


def test_twin_without_lengths_on_the_host():
    """On other devices than CPUs the twin masks the whole capacity, where it may find NaN."""
    for starts in (None, STARTS):
        case = Case(6, 2, 8, torch.float64, starts=starts, capacity=60)
        visible = visible_tokens(case.lengths, case.starts, 60)
        case.check(*attend_visible(case.q, *case.cache, visible, SCALE))


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_a_capacity_costs_nothing(kernel):
    """A cache of 2^31 tokens, all at one address: what looks at each of them takes minutes and much memory."""
    case = Case(4, 2, 8, torch.float32, lengths=(1,))
    device = DEVICE if kernel == "triton" else "cpu"
    cache = tuple(t.expand(1, 2**31 - 1, 2, 8) for t in case.cache.to(device))
    case.lengths, case.spans = torch.tensor([20], dtype=torch.int32), [(0, 20)]
    case.out, case.lse = define(case.q, *(t[:, :20].cpu() for t in cache), case.spans, SCALE)
    case.check(*case.run(kernel, cache))


@pytest.mark.parametrize(("splits", "starts"), in_turn([None, 1, 2, 3, 7, 19], [(None,), (STARTS,)]))
def test_triton_for_any_number_of_splits(splits, starts):
    case = Case(6, 2, 16, torch.float32, starts=starts, capacity=53)
    out, lse = case.run("triton", num_splits=splits)
    case.check(out, lse)
    again = case.run("triton", num_splits=splits)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 15, 16, 35, *long(6, 7, *range(9, 15))])
def test_triton_of_every_group(group):
    """The interpreter's programs have 16 heads, so that the last group takes three."""
    case = Case(2 * group, 2, 16, torch.float32, lengths=(0, 33, 18), starts=(0, 1, 0))
    case.check(*case.run("triton", num_splits=2))


@pytest.mark.parametrize(
    ("head_dim", "dtype"), in_turn([8, 64, 80, 96, 128, 256], [torch.float32, torch.float16, torch.bfloat16])
)
def test_triton_of_every_head_dim(head_dim, dtype):
    case = Case(4, 2, head_dim, dtype, lengths=(37, 0, 20), starts=(2, 0, 19), scale=head_dim**-0.5)
    for splits in (1, 3):
        case.check(*case.run("triton", num_splits=splits))
        wide, _ = case.run("triton", num_splits=splits, out_dtype=torch.float32)
        assert wide.dtype == torch.float32 and norm(wide.cpu() - case.out) < ERRORS[dtype] * norm(case.out)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_views_of_a_larger_cache(kernel):
    """A layer of `[layers, 2, batch, capacity, kv_heads, head_dim]`, heads before tokens, and keys beside values."""
    case = Case(4, 2, 16, torch.float32, starts=STARTS)
    device = DEVICE if kernel == "triton" else "cpu"
    cache = case.cache.to(device)
    layers = torch.full((3, 2, 11, 61, 2, 16), torch.nan, device=device)
    layers[1, :, 2:10, 5:55] = cache
    by_heads = cache.transpose(2, 3).contiguous().transpose(2, 3)
    beside = torch.cat(tuple(cache), -1).split(16, -1)
    joint = torch.cat([case.q.to(device), torch.full((8, 6, 16), torch.nan, device=device)], 1)
    turned = case.q.to(device).transpose(1, 2).contiguous().transpose(1, 2)
    for view in (tuple(layers[1, :, 2:10, 5:55]), tuple(by_heads), beside):
        for q in (None, joint[:, :4], turned):
            case.check(*case.run(kernel, view, q))


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_of_more_than_32_bits(kernel, dim, tmp_path):
    """Sequences, tokens or heads are so far apart; the file has holes, and takes no room."""
    sizes = [3, 3, 3, 8]
    far = 2**30 + 2**10  # numbers: the third is beyond 2^31
    strides = [72, 24, 8, 1]
    strides[dim] = far
    case = Case(6, 3, 8, torch.float16, lengths=(3, 2, 3))
    count = 2 * far + 1024
    if DEVICE == "cuda" and kernel == "triton":
        memory = torch.empty(count, dtype=torch.float16, device=DEVICE)
    else:
        memory = torch.from_file(str(tmp_path / "cache"), shared=True, size=count, dtype=torch.float16)
    keys, values = (memory.as_strided(sizes, strides, at) for at in (0, 512))
    keys.copy_(case.cache[0])
    values.copy_(case.cache[1])
    case.check(*case.run(kernel, (keys, values), num_splits=2))


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_lengths_beyond_the_capacity_and_below_zero(kernel):
    case = Case(2, 1, 16, torch.float32, lengths=(20, 20, 20, 0), starts=(-(2**31), -1, 4, 0))
    case.lengths = torch.tensor([20, 21, 2**31 - 1, -3], dtype=torch.int64)
    case.check(*case.run(kernel))


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_a_visible_nan_stays_in_its_sequence_and_head(kernel):
    case = Case(4, 2, 16, torch.float32, lengths=(20, 33))
    for which in (0, 1):
        cache = case.cache.clone()
        cache[which, 1, 18, 0, 3] = torch.nan
        out, lse = case.run(kernel, cache.to(DEVICE if kernel == "triton" else "cpu"), num_splits=2)
        assert out[1, :2].isnan().any(-1).all() and lse[1, :2].isnan().all() == (which == 0)
        out[1, :2], lse[1, :2] = (t[1, :2].to(out) for t in (case.out, case.lse))
        case.check(out, lse)


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero(kernel, sign):
    """Log-sum-exps near 300 and -300: rows beyond the edge of a block, with a score of zero, must not be weighed."""
    case = Case(2, 1, 16, torch.float32, lengths=(39, 5), scale=0.2)
    case.q[..., 0], case.cache[0, ..., 0] = 30.0, 50.0
    case.scale *= sign
    case.out, case.lse = define(case.q, *case.cache.nan_to_num(), case.spans, case.scale)
    out, lse = case.run(kernel, num_splits=3)
    assert (lse.sign() == sign).all()
    assert norm(lse.double().cpu() - case.lse) < 1e-6 * norm(case.lse)
    assert norm(out.double().cpu() - case.out) < 1e-4 * norm(case.out)  # scores of 300 in fp32 are good to 3e-5


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_nothing_to_do(kernel):
    device = DEVICE if kernel == "triton" else "cpu"
    q, none = torch.ones(2, 4, 16, device=device), torch.empty(2, 0, 2, 16, device=device)
    lengths = torch.tensor([0, 3], dtype=torch.int32, device=device)
    out, lse = decode_attention(q, none, none, lengths, scale=1.0, kernel=kernel)
    assert out.shape == (2, 4, 16) and not out.any() and (lse == -torch.inf).all()
    out, lse = decode_attention(q[:0], none[:0], none[:0], lengths[:0], scale=1.0, kernel=kernel)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float32), (2, torch.float32), (5, torch.bfloat16)])
def test_merge_of_shards_is_attention_over_all(kernel, count, dtype):
    """Tokens dealt to ranks in turn: the shards of short sequences, and of a rank more, are empty."""
    case = Case(6, 2, 40, dtype)
    parts = []
    for rank in range(count):
        lengths = torch.tensor([len(range(rank, n, count)) for n in LENGTHS], dtype=torch.int32)
        cache = tuple(case.cache[:, :, rank::count])
        parts.append(decode_attention(case.q, *cache, lengths, scale=SCALE, out_dtype=torch.float32))
    parts.append((torch.zeros(case.q.shape), torch.full(case.lse.shape, -torch.inf)))
    device = DEVICE if kernel == "triton" else "cpu"
    # One message a rank: the log-sum-exp lies behind the output of its head.
    gathered = torch.stack([torch.cat((out, lse[..., None]), -1) for out, lse in parts]).to(device)
    merged = merge_decode(gathered[..., :-1], gathered[..., -1], out_dtype=dtype, kernel=kernel)
    case.check(*merged)
    wide, lse = merge_decode(gathered[..., :-1], gathered[..., -1], kernel=kernel)
    assert wide.dtype == torch.float32 and norm(wide.cpu() - case.out) < 1e-6 * norm(case.out)
    assert torch.equal(lse, merged[1])


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_merge_of_empty_shards_is_empty(kernel, count):
    device = DEVICE if kernel == "triton" else "cpu"
    outs = torch.zeros(count, 2, 3, 16, device=device)
    out, lse = merge_decode(outs, torch.full((count, 2, 3), -torch.inf, device=device), kernel=kernel)
    assert out.shape == (2, 3, 16) and not out.any() and (lse == -torch.inf).all()


def test_merge_of_more_parts_than_a_program_holds():
    generator = torch.Generator().manual_seed(1)
    outs, lses = (torch.randn(300, 2, 2, *dim, generator=generator).to(DEVICE) for dim in ((16,), ()))
    lses[7:290, 0] = -torch.inf
    weights = lses.double().softmax(0)
    out, lse = merge_decode(outs, lses, kernel="triton")
    torch.testing.assert_close(out.double(), (outs.double() * weights[..., None]).sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(0), rtol=1e-6, atol=1e-6)


def test_merge_keeps_fp64():
    case = Case(4, 2, 8, torch.float64)
    halves = [
        decode_attention(case.q, *case.cache, case.lengths.clamp(max=20), scale=SCALE),
        decode_attention(case.q, *case.cache, case.lengths, starts=torch.full((8,), 20), scale=SCALE),
    ]
    case.check(*merge_decode(*(torch.stack(each) for each in zip(*halves, strict=True))))


def test_splits_fill_the_device():
    """By the capacity: programs for each multiprocessor, no split of less than a block, and one at least."""
    tuning = triton_decode.Tuning(tokens=64, heads=64, warps=4, stages=3, programs=8)
    processors = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 2
    keys = torch.empty(1, 1, 2, 16, device=DEVICE)
    for capacity, rows, splits in (
        (2**20, 1, min(processors * 8, 256)),
        (2**20, 3, min(processors * 8 // 3, 256)),
        (2**20, processors * 8 + 1, 1),
        (129, 1, 3),
        (1, 1, 1),
        (0, 1, 1),
    ):
        cache = keys.expand(1, capacity, 2, 16) if capacity else keys[:, :0]
        assert triton_decode.splits_for(cache, rows, tuning) == splits


@pytest.mark.parametrize(
    ("length", "splits", "shares"),
    [(100, 2, (64, 36)), (200, 4, (64, 64, 64, 8)), (65, 4, (32, 32, 1)), (40, 9, (32, 8)), (3, 2, (3,)), (0, 2, ())],
)
def test_shares_of_splits(monkeypatch, length, splits, shares):
    """Even but for units of 16 tokens, and of a block at least: few tokens are not spread over all splits."""
    kept = []
    monkeypatch.setattr(triton_decode, "_merge_into", lambda _, part_lse, *__: kept.append(part_lse))
    case = Case(1, 1, 16, torch.float32, lengths=(length + 5,), starts=(5,))
    case.q.zero_()  # the log-sum-exp is the logarithm of how many tokens there are
    q, cache, lengths, starts = (each.to(DEVICE) for each in (case.q, case.cache, case.lengths, case.starts))
    tuning = triton_decode.Tuning(32, 16, 4, 1, 8)
    triton_decode.decode_attention(q, *cache, lengths, starts, case.scale, q.dtype, splits, tuning)
    counted = kept[0].cpu().exp().round().int().flatten().tolist()
    assert counted == [*shares, *[0] * (splits - len(shares))]


def test_auto_is_triton_on_gpus_only():
    """In the interpreter Triton runs where it is asked for by name."""
    case = Case(2, 1, 8, torch.float32, lengths=(3,))
    case.check(*case.run("auto"))
    case.check(*merge_decode(case.out.float()[None], case.lse.float()[None]))
    assert not runs_triton("auto", case.q.cpu())

    class OnGpu:
        is_cuda, device, dtype, shape = True, torch.device("cuda"), torch.bfloat16, (1, 2, 8)

    ampere = TritonKernel(AnotherMachine((8, 0), {"triton": None}))
    assert runs_triton("auto", OnGpu, ampere)
    OnGpu.dtype = torch.float64
    assert not runs_triton("auto", OnGpu, ampere)
    OnGpu.dtype, OnGpu.shape = torch.bfloat16, (1, 2, 257)
    assert not runs_triton("auto", OnGpu, ampere)
    OnGpu.shape = (1, 2, 256)
    for machine in (AnotherMachine((8, 0)), AnotherMachine((7, 5), {"triton": None})):
        assert not runs_triton("auto", OnGpu, TritonKernel(machine))


@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_values_have_their_own_head_dim(kernel):
    """Narrower values give the first numbers of each head, wider ones here the same numbers twice."""
    case = Case(4, 2, 24, torch.float32, starts=[0] * (len(LENGTHS) - 1) + [3])
    keys, values = case.cache.to(DEVICE if kernel == "triton" else "cpu")
    for splits in (1, 3):
        for cache, wanted in (
            ((keys, values[..., :11]), case.out[..., :11]),
            ((keys, torch.cat((values, values), -1)), torch.cat((case.out, case.out), -1)),
        ):
            out, lse = case.run(kernel, cache, num_splits=splits)
            assert out.shape == wanted.shape
            torch.testing.assert_close(out.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double().cpu(), case.lse, rtol=1e-5, atol=1e-5)


def test_triton_is_refused_with_a_reason():
    q, lengths = torch.zeros(1, 2, 16, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)

    def run(q, kernel="triton"):
        keys = q[:, None, :1]
        return decode_attention(q, keys, keys, lengths.to(q.device), scale=1.0, kernel=kernel)

    with refused("tritn | did you mean 'triton' | auto, triton, reference", error=KernelError):
        run(q, "tritn")
    with refused(
        "'triton' | float32, bfloat16 and float16 | torch.float64 | fix: use kernel='auto'", error=KernelError
    ):
        run(q.double())
    with refused("up to 256 | 257 | fix: ", error=KernelError):
        run(q.new_zeros(1, 2, 257))
    with refused("TRITON_INTERPRET=1 | meta | fix: ", error=KernelError):
        run(q.to("meta"))
    with refused("float64 | fix: ", error=KernelError):
        merge_decode(q.double()[None], q.double()[None, ..., 0], kernel="triton")
    with refused("Triton | not installed | pip install 'triton | fix: ", error=KernelError):
        runs_triton("triton", q, TritonKernel(AnotherMachine()))


def test_inputs_that_do_not_fit():
    q, keys, lengths = torch.zeros(2, 4, 16), torch.zeros(2, 9, 2, 16), torch.ones(2, dtype=torch.int32)

    def refuse(*words, q=q, keys=keys, values=None, lengths=lengths, **options):
        with refused(*words, error=ValueError):
            decode_attention(q, keys, keys if values is None else values, lengths, scale=1.0, **options)

    refuse("multiple of kv_heads | (2, 4, 16) | (2, 9, 3, 16)", keys=torch.zeros(2, 9, 3, 16))
    refuse("kv_heads | (2, 9, 0, 16)", keys=torch.zeros(2, 9, 0, 16))
    refuse("(3, 9, 2, 16)", keys=torch.zeros(3, 9, 2, 16))
    refuse("(2, 9, 2, 8)", keys=torch.zeros(2, 9, 2, 8))
    refuse("(2, 8, 2, 16)", values=torch.zeros(2, 8, 2, 16))
    refuse("(2, 1, 4, 16)", q=q[:, None])
    refuse("one dtype | torch.float32 | torch.float16", values=keys.half())
    refuse("one dtype and device | cpu | meta", keys=keys.to("meta"))
    turned = torch.zeros(2, 2, 16, 9).permute(0, 3, 1, 2)
    refuse("contiguous last dimension | (288, 1, 144, 9)", keys=turned, values=keys)
    refuse("contiguous last dimension | (288, 1, 144, 9)", values=turned)
    refuse("lengths | [2] int32 or int64 | (3,)", lengths=torch.ones(3, dtype=torch.int32))
    refuse("lengths | torch.float32", lengths=torch.ones(2))
    refuse("starts | [2] | (2, 1)", starts=torch.ones(2, 1, dtype=torch.int32))
    refuse("lengths | cpu | meta", lengths=lengths.to("meta"))
    for splits in (0, -1, 1025):
        refuse(f"num_splits | between 1 and 1024 | {splits}", num_splits=splits)
    for outs, lses in (((2, 4, 16), (2, 4)), ((3, 2, 4, 16), (2, 2, 4)), ((3, 2, 4, 16), (3, 4, 2))):
        with refused("parts | heads", str(outs), error=ValueError):
            merge_decode(torch.zeros(outs), torch.zeros(lses))
