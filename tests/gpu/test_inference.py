"""On real GPUs: sums in one kernel, and inference by heads and by tokens, eager and as CUDA graphs."""

import gc

import pytest
import torch

from bmburst.checkpoint.hugging_face import open_weights
from bmburst.comm.groups import communicator
from bmburst.comm.transports import small_sums
from bmburst.inference.replay import Replay, once
from bmburst.inference.sampling import GenerationOptions, Sampler, SamplerRow
from bmburst.inference.session import Engine, GenerationBatch, Session
from bmburst.inference.weights import ResidentWeights
from bmburst_ops.flash import select_kernel
from tests import tiny
from tests.gpu.over_gpus import GPUS, run_nccl
from tests.inference.models import Greedy, directory, greedy, prompt

pytestmark = pytest.mark.gpu
SIZES = range(2, min(GPUS, 4) + 1)
STEPS = 10
STOPS = (6, 1, 4, 2)  # new tokens that are taken of each answer
HELD: list[Session] = []  # NCCL must end before they are freed


@pytest.mark.parametrize("size", SIZES)
def test_sums_in_one_kernel(size: int) -> None:
    run_nccl(size, _sums)


def _sums() -> None:
    comm = communicator(None)
    for dtype, numbers in ((torch.bfloat16, 4096), (torch.float32, 300_000), (torch.float16, 7)):
        add_up = small_sums(comm, numbers, dtype)
        assert small_sums.__module__ == "bmburst.comm.transports"
        draws = torch.Generator().manual_seed(numbers)
        parts = torch.randn(50, comm.size, numbers, generator=draws).to(dtype)
        mine = parts[:, comm.rank].cuda()
        torch.cuda.synchronize()
        sums = []
        for call, part in enumerate(mine):  # one rank is late, then the other
            if call % comm.size == comm.rank:
                torch.cuda._sleep(200_000)
            sums.append(add_up(part))
        expected = parts.float().sum(1).to(dtype)
        found = torch.stack(sums).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-2)
        (all_ranks,) = comm.all_gather(torch.stack(sums)).wait()
        assert all(torch.equal(each, all_ranks[0]) for each in all_ranks)  # bit for bit
        graph, static = torch.cuda.CUDAGraph(), mine[0].clone()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = add_up(add_up(static))
        for part, total in zip(mine[:5], expected, strict=False):
            static.copy_(part)
            graph.replay()
            twice = total.float() * comm.size
            torch.testing.assert_close(out.cpu().float(), twice, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_tokens_are_those_of_one_cpu(size: int) -> None:
    families = ("llama", "mistral", "qwen2", "qwen3")
    prompts = [prompt(length) for length in (130, 5, 1, 301)]
    expected = {family: [greedy(family, each, STEPS) for each in prompts] for family in families}
    places = {family: str(directory(family)) for family in families}
    run_nccl(size, _tokens, places, prompts, expected)


def _tokens(places, prompts, expected) -> None:
    comm = communicator(None)
    for family, place in places.items():
        weights = ResidentWeights.read(open_weights(place), torch.float32, comm.device)
        for cache in ("auto", "tokens"):
            for chunk in (None, 64):
                engine = Engine.over(weights, comm, cache, chunk)
                batch = GenerationBatch(engine, engine.new_cache(len(prompts), max(map(len, prompts)) + STEPS))
                batch.prefill(prompts)
                found = torch.stack([chosen.tokens for chosen in batch.decode(Greedy(), STEPS)], 1)
                assert found.tolist() == expected[family], (family, cache, chunk)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_turns_replay_the_graph_of_the_first(size: int) -> None:
    """Whether an answer was stopped at its first token, or while the next one was computed."""
    text, expected = (), []
    for turn, stop in enumerate(STOPS):
        text += prompt(9, seed=turn)
        expected.append(greedy("llama", text, stop))
        text += tuple(expected[-1])
    run_nccl(size, _turns, str(directory("llama")), expected)


def _turns(place, expected) -> None:
    comm = communicator(None)
    weights = ResidentWeights.read(open_weights(place), torch.float32, comm.device)
    for cache in ("auto", "tokens"):
        session = Session(Engine.over(weights, comm, cache), 90, GenerationOptions)
        graphs = []
        for turn, tokens in enumerate(expected):
            session.prefill(prompt(9, seed=turn))
            answer = session.generate(max_new_tokens=15)
            assert [next(answer) for _ in tokens] == tokens, (cache, turn)
            graphs.append(session._batch._steps._replay._replayed[0])
        assert all(graph is graphs[0] for graph in graphs)
        HELD.append(session)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_a_graph_samples_what_single_calls_do(size: int) -> None:
    run_nccl(size, _graphs, str(directory("qwen2")))


def _graphs(place) -> None:
    comm = communicator(None)
    weights = ResidentWeights.read(open_weights(place), torch.bfloat16, comm.device)
    options = GenerationOptions(max_new_tokens=60, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=2)
    found = []
    for is_captured in (True, False):
        engine = Engine.over(weights, comm, "tokens")
        batch = GenerationBatch(engine, engine.new_cache(2, 100))
        if not is_captured:
            batch._decoder.may_capture = False
        batch.prefill([prompt(7), prompt(33)])
        rows = [SamplerRow(i, 0, prompt(n)) for i, n in enumerate((7, 33))]
        sampler = Sampler(options, rows, weights.config.vocab_size, comm.device)
        found.append([(c.tokens.tolist(), c.logprobs.tolist(), c.top_ids.tolist()) for c in batch.decode(sampler, 60)])
    assert found[0] == found[1]
    (whole,) = comm.all_gather(torch.tensor([tokens for tokens, *_ in found[0]], device=comm.device)).wait()
    assert all(torch.equal(each, whole[0]) for each in whole)


def test_graphs_that_nothing_needs_do_not_end_a_capture() -> None:
    number = torch.zeros(1, device="cuda")

    def work() -> torch.Tensor:
        for _ in range(5000):  # the collector would run, and free the graphs
            cycle: list[object] = []
            cycle.append(cycle)
        return number + 1

    replay = Replay(lambda: once(work))
    replay()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                number.clone()
            unneeded: list[object] = [graph]
            unneeded.append(unneeded)
            del graph, unneeded
    finally:
        gc.enable()
    assert replay().item() == 1
    assert gc.isenabled()


@pytest.mark.parametrize("size", [1, *SIZES])
def test_a_short_prompt_has_the_same_bits_called_captured_and_replayed(size: int, tmp_path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 320}
    tiny.save(tmp_path, "llama", vocab_size=67, **sizes)
    run_nccl(size, _short, str(tmp_path))


def _short(place) -> None:
    comm = communicator(None)
    wide, weights = (
        ResidentWeights.read(open_weights(place), dtype, comm.device) for dtype in (torch.float32, torch.bfloat16)
    )
    exact, unpadded = (Engine.over(each, comm, kernel="reference") for each in (wide, weights))
    engine = Engine.over(weights, comm)
    q, k = (torch.empty(1, 8, heads, 64, dtype=weights.dtype, device=comm.device) for heads in (4, 2))
    assert (engine.prefill._short is not None) == select_kernel("auto", q, k).recordable
    for length in (5, 128, 300, 301, 7):
        found = []
        for made in (exact, unpadded, engine, engine, engine):
            batch = GenerationBatch(made, made.new_cache(1, length + STEPS))
            batch.prefill([prompt(length)])
            logits = batch.logits.clone()
            found.append((logits, torch.stack([chosen.tokens for chosen in batch.decode(Greedy(), STEPS)])))
        (right, _), (other, _), (first, tokens), *later = found
        assert (first - right).abs().max() < 2 * (other - right).abs().max() + 1e-3
        for again, own in later:
            assert torch.equal(again, first) and torch.equal(own, tokens)
