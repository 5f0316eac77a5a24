"""On a real GPU: decode attention against the twin in fp64, in CUDA graphs while lengths grow, and on caches of GiB."""

import pytest
import torch

from bmburst_ops import triton_decode
from bmburst_ops.decode import decode_attention, merge_decode
from bmburst_ops.triton_decode import Tuning

pytestmark = pytest.mark.gpu
HEADS = [(32, 8, 128), (32, 32, 128), (28, 4, 128), (16, 1, 64), (9, 3, 80), (12, 2, 96), (71, 1, 64), (8, 4, 256)]
ERRORS = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}  # of the norm: weights and output rounded


def make(batch, capacity, heads, kv_heads, head_dim, dtype, fill=None):
    """Return q, a cache `[2, batch, capacity, kv_heads, head_dim]` that is a layer of a larger one, and the scale."""
    generator = torch.Generator("cuda").manual_seed(capacity)
    q = torch.randn(batch, heads, head_dim, device="cuda", generator=generator).to(dtype)
    layers = torch.empty(2, 2, batch, capacity, kv_heads, head_dim, device="cuda", dtype=dtype)
    cache = layers.fill_(torch.nan)[1] if fill is not None else layers.normal_(generator=generator)[1]
    for i, stop in enumerate(fill or ()):
        cache[:, i, :stop].normal_(generator=generator)
    return q, cache, head_dim**-0.5


def counts(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def check(q, cache, lengths, starts, scale, **options):
    """Compare output and log-sum-exp with the twin's in fp64, as far as the cache is visible."""
    out, lse = decode_attention(q, *cache, lengths, starts=starts, scale=scale, kernel="triton", **options)
    seen = max(1, int(lengths.max()))
    wide = (t[:, :seen].double() for t in cache)
    exact, exact_lse = decode_attention(q.double(), *wide, lengths, starts=starts, scale=scale)
    error = (out.double() - exact).norm() / exact.norm()
    assert error < ERRORS[q.dtype], error
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=1e-5)
    return out, lse


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_equals_the_twin_in_fp64(heads, kv_heads, head_dim, dtype):
    """Uneven lengths about the edges of blocks and splits, windows, and NaN wherever nothing was written."""
    lengths = (0, 1, 63, 64, 65, 129, 1000, 4133)
    q, cache, scale = make(8, 5000, heads, kv_heads, head_dim, dtype, fill=lengths)
    windows = counts(*(max(0, length - 100) for length in lengths))
    for starts in (None, windows, counts(*lengths)):
        for splits in (None, 1, 3, 40):
            if starts is not None and splits == 40:
                continue
            if starts is not None and bool((starts >= counts(*lengths)).all()):
                out, lse = decode_attention(q, *cache, counts(*lengths), starts=starts, scale=scale, kernel="triton")
                assert not out.any() and (lse == -torch.inf).all()
            else:
                check(q, cache, counts(*lengths), starts, scale, num_splits=splits)


@pytest.mark.parametrize(("batch", "length"), [(1, 131072), (1, 1048573), (32, 4096)])
def test_long_and_wide(batch, length):
    """A million tokens of a cache of more than 2^31 numbers, and many sequences. Auto takes the Triton kernel."""
    q, cache, scale = make(batch, length, 8, 2, 128, torch.bfloat16)
    lengths = counts(*[length] * batch)
    out, lse = check(q, cache, lengths, None, scale)
    auto = decode_attention(q, *cache, lengths, scale=scale)
    assert torch.equal(out, auto[0]) and torch.equal(lse, auto[1])


def test_tokens_beyond_2_31_numbers():
    memory = torch.empty(2**31 + 2**22, dtype=torch.bfloat16, device="cuda")
    keys, values = (memory.as_strided((1, 33, 1, 128), (0, 2**26, 128, 1), at) for at in (0, 128))
    q, cache, scale = make(1, 33, 4, 1, 128, torch.bfloat16)
    keys.copy_(cache[0])
    values.copy_(cache[1])
    near = decode_attention(q, *cache, counts(33), scale=scale)
    far = decode_attention(q, keys, values, counts(33), scale=scale)
    assert torch.equal(near[0], far[0]) and torch.equal(near[1], far[1])


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_graph_equals_eager_while_lengths_grow(batch, windowed):
    """One capture for all lengths, with the same bits; nothing of it waits for the device."""
    q, cache, scale = make(batch, 20000, 32, 8, 128, torch.bfloat16)
    lengths, starts = counts(*range(batch)), counts(*[0] * batch) if windowed else None

    def attend():
        out, lse = decode_attention(q, *cache, lengths, starts=starts, scale=scale, kernel="triton")
        return merge_decode(torch.stack([out.float()] * 2), torch.stack([lse] * 2), out_dtype=q.dtype)

    attend()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for step in (0, 1, 62, 1, 1, 500, 1000, 9000, 8000):
        lengths += step
        if starts is not None:
            starts.copy_(lengths - 700)  # below 0 at first
        q.normal_()
        graph.replay()
        for ours, eager in zip(captured, attend(), strict=True):
            assert torch.equal(ours, eager)
        reference = decode_attention(q.double(), *cache.double(), lengths, starts=starts, scale=scale)
        assert (captured[0].double() - reference[0]).norm() <= ERRORS[q.dtype] * reference[0].norm()


@pytest.mark.parametrize(
    "tuning", [Tuning(32, 16, 4, 4, 4), Tuning(64, 64, 8, 2, 16), Tuning(128, 32, 8, 3, 2)], ids=str
)
def test_results_do_not_hang_on_the_tuning(tuning):
    q, cache, scale = make(3, 3000, 32, 8, 128, torch.bfloat16)
    lengths = counts(3000, 17, 2049)
    ours, lse = triton_decode.decode_attention(q, *cache, lengths, None, scale, torch.float32, tuning=tuning)
    exact, exact_lse = decode_attention(q.double(), *cache.double(), lengths, scale=scale)
    assert (ours - exact).norm() < ERRORS[q.dtype] * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=1e-5)
