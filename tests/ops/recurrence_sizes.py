"""Compiles the kernels of recurrences for GPUs that this machine lacks, and ends with what does not fit."""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmburst_ops.fragments import CHUNK
from bmburst_ops.linear import tiles, triton_decay, triton_gated_delta, triton_kda, triton_kda_gradients, triton_norms
from bmburst_ops.linear.spans import all_fragments

SHARED = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes of shared memory for a program, by compute capability
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", int: "i32", float: "fp32"}


class Compiled:
    """A kernel that is compiled in place of being launched."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, _):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, maxnreg=None, **constants):
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False))
        constants |= {name: None for name, each in given.items() if each is None}
        types = {n: TYPES[getattr(x, "dtype", type(x))] for n, x in given.items() if x is not None}
        source = ASTSource(
            self.kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): each for name, each in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types.get(n, "").startswith("*")},
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        if made.metadata.shared > SHARED[self.capability]:
            raise SystemExit(f"{self.kernel.__name__} on {self.capability}: {made.metadata.shared} bytes")


def run(key_dim):
    """Call each function that launches a kernel."""
    tokens, heads = 2 * CHUNK, 2
    fragments = all_fragments((0, tokens), torch.device("cpu"))
    spans = fragments.spans
    q, k, v, grad = (torch.zeros(1, tokens, heads, key_dim, dtype=torch.bfloat16) for _ in range(4))
    decays, beta = torch.zeros(1, tokens, heads), torch.zeros(1, tokens, heads, dtype=torch.bfloat16)
    state = torch.zeros(1, heads, key_dim, key_dim)
    delta, decay = triton_gated_delta, triton_decay
    (chunks, norms), inputs = delta.make_chunks(q, k, decays, beta, True, fragments), decay.DecayInputs(q, k, decays)
    raw = chunks._replace(norms=norms)  # what the backward pass has
    delta.summarize(chunks, v, spans, spans)
    decay.summarize(inputs, v, spans)
    delta.outputs(chunks, v, state, 1.0, spans)
    decay.outputs(inputs, v, state, 1.0, spans)
    for ours, given in ((delta, raw), (decay, inputs)):
        ours.start_gradients(given, grad, 1.0, spans)
    of_chunks = (
        *delta.states_of_chunks(raw, v, state, fragments),
        *delta.gradients_of_chunks(raw, grad, state, 1.0, fragments),
    )
    delta.input_gradients(raw, v, beta, grad, of_chunks, 1.0, fragments)
    states = decay.states_of_chunks(inputs, v, state, fragments)
    grads, _ = decay.gradients_of_chunks(inputs, grad, state, 1.0, fragments)
    decay.input_gradients(inputs, v, grad, states, grads, 1.0, fragments)

    kda = triton_kda
    chunks = kda.make_chunks(q, k, torch.zeros(1, tokens, heads, key_dim), beta, True, 1.0, fragments)
    kda.summarize(chunks, v, spans, spans)
    kda.outputs(chunks, v, state, 1.0, spans)
    kda.start_gradients(chunks, grad, 1.0, spans)
    of_chunks = (
        *kda.states_of_chunks(chunks, v, state, fragments),
        *kda.gradients_of_chunks(chunks, grad, state, 1.0, fragments),
    )
    triton_kda_gradients.input_gradients(chunks, q, k, v, beta, grad, of_chunks, 1.0, fragments)


modules = triton_gated_delta, triton_decay, triton_kda, triton_kda_gradients, triton_norms
kernels = [(each, name, kernel) for each in modules for name, kernel in vars(each).items() if name.endswith("_kernel")]
for capability, shared in SHARED.items():
    tiles.shared_memory = lambda _, shared=shared: shared
    for module, name, kernel in kernels:
        setattr(module, name, Compiled(kernel, capability))
    for size in map(int, sys.argv[1:]):
        run(size)
