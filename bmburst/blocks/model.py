"""LLaMA on BMTrain: the whole model. Each rank computes its shard of the sequence."""

import hashlib
import math
from collections.abc import Callable, Collection
from functools import partial

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.attention.module import BurstAttention
from bmburst.attention.options import MaskOption
from bmburst.blocks.config import AT_ONCE, LlamaConfig, LoRAConfig
from bmburst.blocks.gathering import GatherMemory
from bmburst.blocks.graphed import BlockGraphs
from bmburst.blocks.layers import NF4, RMSNorm, Table, TensorGroup, freeze, quantized_linears, rows_of
from bmburst.blocks.recomputed import BlockSegments
from bmburst.blocks.rope import rotary_tables
from bmburst.blocks.sharded import ShardedBlock
from bmburst.blocks.stages import Stage, StageBlocks
from bmburst.blocks.streamed import StreamedBlock
from bmburst.blocks.transformer import AttentionFactory, Batch, NormFactory, TransformerBlock
from bmburst.comm.host_memory import HostMemory, ShardCopies
from bmburst.errors import UserError
from bmburst.loss import DEFAULT_CHUNK, IGNORE_INDEX, require_ids, token_loss_sum
from bmburst.mesh import current_mesh
from bmburst.recompute.host_store import HostStore
from bmburst.recompute.policy import Policy
from bmburst.schedule.mask import Causal, Mask, SlidingWindow, make_mask
from bmburst.schedule.parallelism import MeshShape
from bmburst.schedule.pipeline import leaves_weights
from bmburst.zero import describe, named_shards, scatter
from bmburst_ops import nf4
from bmburst_ops.errors import KernelError
from bmburst_ops.linears import LaterProducts
from bmburst_ops.rms_norm import choose_norm

_IN_BLOCKS = ".layers."
_INTO_THE_STREAM = ("o_proj.weight", "down_proj.weight")


def initialize(model: torch.nn.Module, config: LlamaConfig, seed: int) -> None:
    """Initialize norms with 1, biases with 0, tables with N(0, init_std), matrices of blocks with N(0, matrix_std).

    The output projections of attention and MLP use matrix_std / sqrt(2 num_layers), so that the variance of the
    residual stream does not grow with depth (GPT-2, section 2.3 of "Language Models are Unsupervised Multitask
    Learners"; common in LLaMA training code). With scale_depth they use matrix_std: the forward pass scales them.

    Weights are drawn in fp32 and rounded: runs in two dtypes start from the same weights up to rounding.
    """
    quantized = quantized_linears(model)
    for shard in named_shards(model):
        if not shard.count:
            continue
        device = shard.device
        if (linear := quantized.get(shard.name)) is not None:
            name, dtype = f"{shard.name.removesuffix(NF4)}weight", linear.weight.dtype
            weight = draw_normal(linear.shape, _std(config, name), f"{seed} {name}", device)
            scatter(shard, nf4.quantize(weight.to(dtype)))
            continue
        if shard.name.endswith((".lora_A", ".lora_B")):
            scatter(shard, _adapter(shard.shape, f"{seed} {shard.name}", device, is_zero=shard.name.endswith("B")))
            continue
        if len(shard.shape) == 1:
            scatter(shard, torch.full(shard.shape, 0.0 if shard.name.endswith("bias") else 1.0, device=device))
            continue
        scatter(shard, draw_normal(shard.shape, _std(config, shard.name), f"{seed} {shard.name}", device))


def _std(config: LlamaConfig, name: str) -> float:
    """Return the standard deviation of a fresh matrix."""
    shrinks = config.scale_depth is None and name.endswith(_INTO_THE_STREAM)
    depth = math.sqrt(2 * config.num_layers) if shrinks else 1.0
    return config.matrix_std / depth if _IN_BLOCKS in name else config.init_std


def _adapter(shape: tuple[int, ...], key: str, device: torch.device, *, is_zero: bool) -> Tensor:
    """Return PEFT's initial adapter: B is zero, A is kaiming_uniform_ with a = sqrt(5), U(-1/sqrt(in), 1/sqrt(in))."""
    made = torch.zeros(shape, dtype=torch.float32, device=device)
    bound = 1 / math.sqrt(shape[1])
    return made if is_zero else made.uniform_(-bound, bound, generator=_generator(key, device))


def draw_normal(shape: tuple[int, ...], std: float, key: str, device: torch.device) -> Tensor:
    """Return an fp32 tensor drawn from N(0, std).

    It depends on `key`, which seeds the generator, and on whether the device is a GPU: torch's generators differ.
    """
    made = torch.empty(shape, dtype=torch.float32, device=device)
    return made.normal_(0.0, std, generator=_generator(key, device))


def _generator(key: str, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    # 63 bits of a SHA-256: nearby seeds must not give correlated numbers, and Python's hash() differs by process.
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    return generator


class LlamaModel(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Embedding, blocks and final norm: the module `model` in Hugging Face's parameter names."""

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionFactory,
        dtype: torch.dtype,
        recompute: Policy,
        zero_level: int,
        tensor: TensorGroup,
        mlp_chunk: int | None,
        norm: NormFactory,
        offload_weights: bool,
        host_memory: HostMemory,
        lora: LoRAConfig | None,
        kept_apart: frozenset[str],
        stage: Stage,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        store, segments, copies = HostStore(host_memory), BlockSegments(), ShardCopies(host_memory)
        # ZeRO-2 keeps the weights of all blocks gathered from forward to backward.
        memory = self.gather_memory = GatherMemory(len(stage.layers) if zero_level == 2 else AT_ONCE)

        def wrapped(block: TransformerBlock, number: int) -> bmt.Block:
            if not offload_weights:
                recomputes, is_frozen = block.recompute.recomputes, lora is not None
                leaves = leaves_weights(stage.number, recomputes=recomputes, is_frozen=is_frozen)
                later = LaterProducts() if leaves else None
                return ShardedBlock(block, zero_level=zero_level, memory=memory, later=later)
            made = StreamedBlock(block, copies, number, memory, is_written=False)
            if number == 0:  # reserve memory for the weights of the other blocks and for all gradients
                host_memory.prepare(made.shard_bytes() * (config.num_layers - 1))
                host_memory.prepare(made.shard_bytes(trained=True) * config.num_layers)
            return made

        def block(number: int, policy: Policy) -> TransformerBlock:
            prefetches = recompute.prefetches(number, config.num_layers)
            given = config, attention, dtype, policy, tensor, store, segments, mlp_chunk, norm, lora
            return TransformerBlock(*given, layer=number, kept_apart=kept_apart, prefetches=prefetches)

        policies = recompute.of_layers(config.num_layers)
        if stage.is_first or (stage.is_last and config.tie_embeddings):
            self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype=dtype)
        blocks = [wrapped(block(number, policies[number]), number) for number in stage.layers]
        self.layers: bmt.TransformerBlockList = StageBlocks(blocks, stage.layers)
        segments.wrap(self.layers)
        if stage.is_last:
            # The final norm applies the factor on logits, so that every user of the hidden states gets scaled logits.
            self.norm = norm(config.hidden_size, factor=config.logit_scale)
        if lora is not None:
            for name in ("embed_tokens", "norm"):
                if (module := self._modules.get(name)) is not None:
                    freeze(module, lora, f"model.{name}.")


class Llama(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """LLaMA with its language model head. Parameters have Hugging Face's names.

    Every rank must build the model with the same arguments and call the same methods in the same order. With tensor
    parallelism (`bmburst.start(tensor=N)`), the matrices and heads are sharded over the ranks of a tensor group, and
    these ranks get the same tokens; see `bmburst.blocks.layers`.

    Args:
        config: The model's configuration.
        attention: Factory of a block's attention module. Default: causal `BurstAttention` over the current mesh.
            Example: `functools.partial(BurstAttention, layout="striped", group=mesh.sequence)`.
        dtype: dtype of weights and activations.
        recompute: Recompute policy of `bmburst.recompute.policy`, for example "none", "block", "block-keep-attention",
            "block-keep-attention:0.5" or "block-keep-attention+offload"; "block-keep-attention+first-20" recomputes
            only the first 20 layers. "auto" is not allowed, because it depends on the whole training step.
        zero_level: BMTrain's ZeRO stage, 2 or 3.
        seed: Seed of the initial weights, which do not depend on the number of ranks; GPUs draw others than CPUs. None
            leaves them uninitialized, for a caller that loads them.
        loss_chunk: Number of tokens whose logits `loss` computes at once.
        mlp_chunk: Number of a rank's tokens that an MLP computes at once. None: 16384 if blocks are recomputed, else
            all; 0: all.
        norm_kernel: "auto", or another of `bmburst_ops.rms_norm.KERNELS`.
        offload_weights: Whether weights and gradients of the blocks are kept in host memory and copied to the GPU
            block by block. Needs `zero_level` 3; training also needs `bmburst.optim.AdamW(offload=True)`.
        host_memory: Allocator of pinned memory, for weights and for activations that recompute policies offload.
        lora: Low-rank adapters to train; the weights are then frozen, and those of matrices in blocks in 4 bits if
            its base says so. Default: the weights are trained.
        kept_apart: What the optimizer treats differently from other parameters of a block, from
            `bmburst.blocks.kinds.apart`. Default: it treats all matrices alike, and all vectors.
        block_graphs: Whether the kernels of blocks run as CUDA graphs in training: faster where the host bounds a step,
            and more memory; see `bmburst.blocks.graphed`. Results are the same. It has no effect on a CPU, without
            enough free memory, and in passes with `keys`. It needs recompute "none", no weights in host memory or in 4
            bits, and neither tensor nor pipeline parallelism.
        stage: The part of the model that this rank has, from `bmburst.blocks.stages.Stage.of_bmtrain`. Default: all.
            A stage has `advance` or `stage_loss`; `bmburst.train.pipelined` runs them in the right order.

    Raises:
        UserError: An option has an unknown value, the model does not support the tensor degree, or with tensor
            parallelism neither `attention` nor a current mesh defines the ranks that share a sequence.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: AttentionFactory | None = None,
        dtype: torch.dtype = torch.float32,
        recompute: str | Policy = "none",
        zero_level: int = 3,
        seed: int | None = 0,
        loss_chunk: int = DEFAULT_CHUNK,
        mlp_chunk: int | None = None,
        norm_kernel: str = "auto",
        offload_weights: bool = False,
        host_memory: HostMemory | None = None,
        lora: LoRAConfig | None = None,
        kept_apart: Collection[str] = (),
        block_graphs: bool = False,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        policy = Policy.parse(recompute)
        policy.require_layers(config.num_layers)
        if zero_level not in (2, 3):
            raise UserError(f"zero_level {zero_level}\nfix: 2 or 3")
        if offload_weights and zero_level != 3:
            raise UserError(f"offload_weights with zero_level {zero_level}\nfix: zero_level 3")
        if loss_chunk < 1:
            raise UserError(f"loss_chunk {loss_chunk}\nfix: at least 1 token, for example 1024")
        if mlp_chunk is not None and mlp_chunk < 0:
            raise UserError(f"mlp_chunk {mlp_chunk}\nfix: at least 1 token, 0 for all tokens, or None")
        _require_norm(norm_kernel, config, dtype)
        if lora is not None:
            lora.require_model(config)
        tensor = TensorGroup.of_bmtrain()
        policy.require_tensor(tensor.size)
        if lora is not None:
            lora.require_tensor(tensor.size)
            if lora.is_4bit:
                _require_kernel(partial(nf4.require_device, torch.empty(1, dtype=dtype).cuda()))
        config.require_mesh(MeshShape(1, 1, tensor.size))
        if tensor.size > 1 and attention is None and current_mesh() is None:
            raise UserError(
                f"with tensor parallelism {tensor.size} attention must know which ranks share a sequence\n"
                "fix: with mesh.current(): Llama(...), or attention=functools.partial(BurstAttention, "
                "group=mesh.sequence)"
            )
        stage = stage or Stage.whole(config.num_layers)
        is_quantized = lora is not None and lora.is_4bit
        if block_graphs and (policy.name != "none" or offload_weights or is_quantized or tensor.size * stage.count > 1):
            raise UserError(
                f"block_graphs with recompute {policy.name}, offload_weights {offload_weights}, weights in 4 bits "
                f"{is_quantized}, tensor parallelism {tensor.size}, {stage.count} pipeline stages\n"
                "fix: recompute 'none', weights on the GPU in 16 or 32 bits, no such parallelism; or no block_graphs"
            )
        if stage.count > 1:
            policy.require_stages(stage.count)
            if lora is not None:
                lora.require_stages(stage.count, zero_level)
        self.config, self.tensor, self.lora, self.stage = config, tensor, lora, stage
        self.loss_chunk = loss_chunk
        self._checked_on_device = False
        attention = attention or partial(BurstAttention, mask="causal")
        norm = partial(RMSNorm, eps=config.norm_eps, dtype=dtype, kernel=norm_kernel)
        self.host_memory = memory = host_memory or HostMemory()
        with stage.sharding():
            self.model = LlamaModel(
                *(config, attention, dtype, policy, zero_level, tensor, mlp_chunk, norm, offload_weights, memory, lora),
                frozenset(kept_apart),
                stage,
            )
            if stage.is_last and not config.tie_embeddings:
                self.lm_head = Table(config.vocab_size, config.hidden_size, dtype=dtype)
                if lora is not None:
                    freeze(self.lm_head, lora, "lm_head.")
        has_graphs = block_graphs and torch.cuda.is_available()
        self.graphs = BlockGraphs(self.model.gather_memory) if has_graphs else None
        first = next(iter(self.model.layers)).self_attn.attention
        layout = getattr(getattr(first, "options", None), "layout", None)
        if config.sliding_window is not None and layout == "balanced":
            raise UserError(
                "layout 'balanced' is made for the mask of a batch and cannot be combined with sliding_window\n"
                "fix: layout 'zigzag' or 'striped', or sliding_window none"
            )
        if stage.count > 1:
            self.described = describe(self)
        if seed is not None:
            initialize(self, config, seed)

    def forward(
        self, tokens: Tensor, positions: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return the final hidden states of this rank's tokens, `[batch, tokens, hidden_size]`: the input of the head.

        They are the output of the last norm times `config.logit_scale`, which is 1 except in MiniCPM. All ranks of a
        tensor group return the same states. Gradients are summed over ranks, so a custom loss must count each token
        on one rank only, as `loss` does.

        Args:
            tokens: `[batch, tokens]` int64, this rank's shard.
            positions: `[batch, tokens]` int64, position of each token in the whole sequence, or in its document.
            length: Tokens of the whole sequence over all ranks, without the padding at its end. Default: the length
                of the mask, or all tokens.
            mask: Mask of this batch, as in `burst_attention`. Default: the mask of the attention modules.

        Raises:
            UserError: A token id is out of range. Checked in every pass on a CPU and in the first pass on a GPU.
        """
        self._require_whole()
        hidden = self._hidden(tokens, positions, length, self.model.embed_tokens.weight, mask)
        return self.tensor.gather(hidden, tokens.shape[1])

    def logits(
        self, tokens: Tensor, positions: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return the logits of all tokens, `[batch, tokens, vocab_size]`; for short inputs only. See `forward`."""
        self._require_whole()
        embedding = self.model.embed_tokens.weight
        hidden = self.tensor.gather(self._hidden(tokens, positions, length, embedding, mask), tokens.shape[1])
        return torch.nn.functional.linear(hidden, self._head(embedding))

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab_size]` of hidden states that `forward` returned; for few tokens."""
        self._require_whole()
        table = self.model.embed_tokens if self.config.tie_embeddings else self.lm_head
        return torch.nn.functional.linear(hidden, table.weight)

    def loss(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor,
        length: int | None = None,
        mask: MaskOption | None = None,
        *,
        per_token: bool = False,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of this rank's token losses in nats, a scalar in fp32 or wider.

        Apply `bmburst.loss.global_mean` to it before BMTrain's `OptimManager.backward`. In a tensor group each token
        counts on one rank, so the total loss is the sum over all ranks.

        Args:
            tokens: See `forward`.
            positions: See `forward`.
            labels: `[batch, tokens]` int64, the next token of each token; `bmburst.loss.IGNORE_INDEX`: no loss.
            length: See `forward`.
            mask: See `forward`.
            per_token: Whether to return the loss of each of this rank's tokens instead of the sum. The backward pass
                then recomputes the logits.
            keys: `[batch, tokens]` int32, a key of each token from `bmburst_ops.dropout.keys`. Dropout of adapters
                drops elements by these keys, the same on any number of ranks. Default: no dropout.

        Raises:
            UserError: A token id or label is out of range.
        """
        self._require_whole()
        return self.stage_loss(None, tokens, positions, labels, length, mask, per_token=per_token, keys=keys)

    def stage_loss(
        self,
        stream: Tensor | None,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor,
        length: int | None = None,
        mask: MaskOption | None = None,
        *,
        per_token: bool = False,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Return the result of `loss` on the last stage of a pipeline.

        `stream` is the result of `advance` on the stage before; None: there is none. The other arguments are those of
        `loss`.
        """
        check = not (self._checked_on_device and labels.is_cuda)
        embedding = self.model.embed_tokens.weight if stream is None else None
        hidden = self._hidden(tokens, positions, length, embedding, mask, keys, stream)
        head = self._head(embedding)
        del embedding  # peak memory can be in the loss, which reads only the head
        own = self.tensor.own(labels, pad_value=IGNORE_INDEX)
        return token_loss_sum(hidden, head, own, chunk=self.loss_chunk, check=check, per_token=per_token)

    def advance(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: int | None = None,
        mask: MaskOption | None = None,
        *,
        keys: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this stage, `[batch, own tokens, hidden_size]`, for the next stage.

        `stream` is the result of the stage before; None on the first stage. The other arguments are those of `loss`,
        and the same on every stage.
        """
        embedding = self.model.embed_tokens.whole() if self.stage.is_first else None
        return self._hidden(tokens, positions, length, embedding, mask, keys, stream)

    def new_stream(self, tokens: Tensor) -> Tensor:
        """Return memory for the stream of another stage, of `tokens` of `[batch, tokens]`."""
        rows, count = tokens.shape
        size = rows, -(-count // self.tensor.size), self.config.hidden_size
        return torch.empty(size, dtype=self.model.dtype, device=tokens.device)

    def _require_whole(self) -> None:
        if self.stage.count > 1:
            raise UserError(
                f"this rank has stage {self.stage.number} of {self.stage.count} of the model only\n"
                "allowed: training and its evaluation\nfix: load a checkpoint without a pipeline"
            )

    def _hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: int | None,
        embedding: Tensor | None,
        mask: MaskOption | None,
        keys: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states `[batch, own tokens, hidden_size]`: this rank's share of its tensor group.

        `embedding` is the gathered embedding table. In a pipeline, stages after the first get the `stream` of the stage
        before instead, and stages before the last return their stream, which is not normed.
        """
        if tokens.shape != positions.shape or tokens.dim() != 2:
            raise UserError(
                f"tokens {tuple(tokens.shape)} and positions {tuple(positions.shape)} differ in shape\n"
                "fix: both [batch, tokens]"
            )
        if not (tokens.is_cuda and self._checked_on_device):
            require_ids("token id", tokens, self.config.vocab_size)
            self._checked_on_device = True
        config, model = self.config, self.model
        cos, sin = rotary_tables(config, positions, length, model.dtype)
        if embedding is not None:
            stream = rows_of(self.tensor.own(tokens), embedding, factor=config.embedding_scale)
        graphs = self.graphs if keys is None and torch.is_grad_enabled() else None
        tables = () if graphs is None else graphs.begin(cos, sin)
        if tables:
            cos, sin = tables
        batch = Batch(cos, sin, length, within(config.sliding_window, mask), keys, graphs if tables else None)
        hidden: Tensor = model.layers(stream, batch)
        if graphs is not None:
            graphs.end()
        return model.norm(hidden) if self.stage.is_last else hidden

    def _head(self, embedding: Tensor | None) -> Tensor:
        """Return the gathered weight of the head; a tied head reuses the gathered embedding."""
        if not self.config.tie_embeddings:
            return self.lm_head.whole()
        return self.model.embed_tokens.whole() if embedding is None else embedding


def _require_norm(kernel: str, config: LlamaConfig, dtype: torch.dtype) -> None:
    if kernel == "auto":
        return
    for features in (config.hidden_size, config.head_dim) if config.qk_norm else (config.hidden_size,):
        row = torch.empty(features, dtype=dtype).cuda()  # the device of BMTrain's parameters
        _require_kernel(partial(choose_norm, kernel, row, row))


def _require_kernel(find: Callable[[], object]) -> None:
    try:
        find()
    except KernelError as error:
        raise UserError(str(error)) from None


def within(window: int | None, mask: MaskOption | None) -> MaskOption | None:
    """Return the intersection of a batch's mask with the model's sliding window.

    Args:
        window: `sliding_window` of the configuration; None: the mask is returned unchanged.
        mask: Mask of the batch. None: the attention modules' mask, which must be causal if there is a window.
    """
    if window is None:
        return mask
    if isinstance(mask, tuple):
        return tuple(_within(window, one) for one in mask)
    return _within(window, mask)


def _within(window: int, mask: Mask | str | None) -> Mask:
    made = Causal() if mask is None else make_mask(mask)
    near = SlidingWindow(window)
    return near if made == Causal() else near & made
