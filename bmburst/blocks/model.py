"""LLaMA on BMTrain: the whole model, on this rank's part of the sequence."""

import hashlib
import math
from functools import partial

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.attention.module import BurstAttention
from bmburst.attention.options import MaskOption
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.layers import RMSNorm, Table, TensorGroup, freeze, rows_of, with_graph
from bmburst.blocks.lora import LoRAConfig
from bmburst.blocks.recomputed import BlockSegments
from bmburst.blocks.rope import rotary_tables
from bmburst.blocks.streamed import StreamedBlock
from bmburst.blocks.transformer import AttentionFactory, NormFactory, TransformerBlock
from bmburst.comm.host_memory import HostMemory, ShardCopies
from bmburst.errors import UserError
from bmburst.loss import DEFAULT_CHUNK, IGNORE_INDEX, require_ids, token_loss_sum
from bmburst.mesh import current_mesh
from bmburst.recompute.host_store import HostStore
from bmburst.recompute.policy import Policy
from bmburst.schedule.mask import Causal, Mask, SlidingWindow, make_mask
from bmburst.schedule.mesh_shape import MeshShape
from bmburst.zero import named_shards, scatter
from bmburst_ops.errors import KernelError
from bmburst_ops.rms_norm import choose_norm

_IN_BLOCKS = ".layers."
_INTO_THE_STREAM = ("o_proj.weight", "down_proj.weight")


def initialize(model: torch.nn.Module, config: LlamaConfig, seed: int) -> None:
    """Fill a model: norms with 1, biases with 0, tables from N(0, init_std), matrices of blocks from N(0, matrix_std).

    The output projections of attention and MLP are drawn with matrix_std / sqrt(2 num_layers), so that the variance of
    the residual stream does not grow with depth (GPT-2, section 2.3 of "Language Models are Unsupervised Multitask
    Learners"; common in LLaMA training codes). With scale_depth the model scales them itself.

    Weights are drawn in fp32 and rounded: runs in two dtypes start from the same weights up to rounding.
    """
    for shard in named_shards(model):
        if not shard.count:
            continue
        device = shard.device
        if shard.name.endswith((".lora_A", ".lora_B")):
            scatter(shard, _adapter(shard.shape, f"{seed} {shard.name}", device, is_zero=shard.name.endswith("B")))
            continue
        if len(shard.shape) == 1:
            scatter(shard, torch.full(shard.shape, 0.0 if shard.name.endswith("bias") else 1.0, device=device))
            continue
        shrinks = config.scale_depth is None and shard.name.endswith(_INTO_THE_STREAM)
        depth = math.sqrt(2 * config.num_layers) if shrinks else 1.0
        std = config.matrix_std / depth if _IN_BLOCKS in shard.name else config.init_std
        scatter(shard, draw_normal(shard.shape, std, f"{seed} {shard.name}", device))


def _adapter(shape: tuple[int, ...], key: str, device: torch.device, *, is_zero: bool) -> Tensor:
    """Return zeros for B, and for A what PEFT draws: kaiming_uniform_ with a = sqrt(5), from 1 / sqrt(in) each way."""
    made = torch.zeros(shape, dtype=torch.float32, device=device)
    bound = 1 / math.sqrt(shape[1])
    return made if is_zero else made.uniform_(-bound, bound, generator=_generator(key, device))


def draw_normal(shape: tuple[int, ...], std: float, key: str, device: torch.device) -> Tensor:
    """Return a tensor from N(0, std) in fp32; its numbers depend on `key` alone."""
    made = torch.empty(shape, dtype=torch.float32, device=device)
    return made.normal_(0.0, std, generator=_generator(key, device))


def _generator(key: str, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    # 63 bits of a hash: neighbouring seeds must not give related numbers, and Python's own hash differs by process.
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    return generator


class LlamaModel(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Embedding, blocks and final norm: `model` in Hugging Face's names."""

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
    ) -> None:
        super().__init__()
        self.config, self.tensor = config, tensor
        store, segments, copies = HostStore(host_memory), BlockSegments(), ShardCopies(host_memory)

        def wrapped(block: TransformerBlock, number: int) -> bmt.Block:
            if offload_weights:
                made = StreamedBlock(block, copies, number)
                if number == 0:  # for the weights of the other blocks, and for all gradients
                    host_memory.prepare(made.shard_bytes() * (config.num_layers - 1))
                    host_memory.prepare(made.shard_bytes(trained=True) * config.num_layers)
                return made
            # Recomputation is ours (bmburst.recompute): BMTrain's would run the ring a second time.
            return bmt.Block(block, use_checkpoint=False, zero_level=zero_level)

        shared = tensor, store, segments, mlp_chunk, norm, lora
        self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = bmt.TransformerBlockList(
            [
                wrapped(TransformerBlock(config, attention, dtype, policy, *shared), number)
                for number, policy in enumerate(recompute.of_layers(config.num_layers))
            ]
        )
        segments.wrap(self.layers)
        # The factor on logits is here, before anything reads the hidden states: every head gives the right logits.
        self.norm = norm(config.hidden_size, factor=config.logit_scale)
        if lora is not None:
            freeze(self.embed_tokens)
            freeze(self.norm)

    def forward(
        self, tokens: Tensor, positions: Tensor, length: int | None, embedding: Tensor, mask: MaskOption | None = None
    ) -> Tensor:
        """Return the hidden states of this rank's tokens of its tensor group.

        See `Llama.forward`; `embedding` is the gathered table.
        """
        cos, sin = rotary_tables(self.config, positions, length, embedding.dtype)
        hidden = with_graph(rows_of(self.tensor.own(tokens), embedding, factor=self.config.embedding_scale))
        hidden = self.layers(hidden, cos, sin, length, within(self.config.sliding_window, mask))
        normed: Tensor = self.norm(hidden)
        return normed


class Llama(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """LLaMA with its language model head. Parameters are named as Hugging Face names them.

    Every rank of the world builds it with the same arguments and calls the same methods in the same order. Where
    BMTrain was started with tensor parallelism (`bmburst.start(tensor=N)`), the ranks of a tensor group share its
    matrices and heads, and are given the same tokens; see `bmburst.blocks.layers`.

    Args:
        config: The model's configuration.
        attention: Returns one block's attention; by default causal `BurstAttention` over the current mesh. Pass for
            example `functools.partial(BurstAttention, layout="striped", group=mesh.sequence)`.
        dtype: dtype of weights and activations.
        recompute: Recompute policy of `bmburst.recompute.policy`, for example "none", "block", "block-keep-attention",
            "block-keep-attention:0.5" or "block-keep-attention+offload", or of the first layers alone
            "block-keep-attention+first-20". Not "auto", which needs the whole step.
        zero_level: BMTrain's ZeRO stage, 2 or 3.
        seed: Seed of the initial weights, which do not depend on the number of ranks. None leaves them
            uninitialized, for a caller that loads them.
        loss_chunk: Tokens whose logits `loss` computes at once.
        mlp_chunk: Tokens of a rank that an MLP computes at once. None: 16384 where blocks are recomputed, else all;
            0: all.
        norm_kernel: "auto", or another of `bmburst_ops.rms_norm.KERNELS`.
        offload_weights: Whether weights and gradients of the blocks live in host memory, and visit the GPU block by
            block. Needs `zero_level` 3, and `bmburst.optim.AdamW(offload=True)` to be trained.
        host_memory: Where pinned memory comes from, for weights and for what recompute policies offload.
        lora: Low-rank adapters to train in place of the weights, which are frozen. Default: the weights are trained.

    Raises:
        UserError: An option has an unknown value, the ranks of a tensor group cannot share the model, or with tensor
            parallelism neither attention nor a current mesh says which ranks share a sequence.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: AttentionFactory | None = None,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        zero_level: int = 3,
        seed: int | None = 0,
        loss_chunk: int = DEFAULT_CHUNK,
        mlp_chunk: int | None = None,
        norm_kernel: str = "auto",
        offload_weights: bool = False,
        host_memory: HostMemory | None = None,
        lora: LoRAConfig | None = None,
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
        tensor = TensorGroup.of_bmtrain()
        policy.require_tensor(tensor.size)
        config.require_mesh(MeshShape(1, 1, tensor.size))
        if tensor.size > 1 and attention is None and current_mesh() is None:
            raise UserError(
                f"with tensor parallelism {tensor.size} attention must know which ranks share a sequence\n"
                "fix: with mesh.current(): Llama(...), or attention=functools.partial(BurstAttention, "
                "group=mesh.sequence)"
            )
        self.config, self.tensor, self.lora = config, tensor, lora
        self.loss_chunk = loss_chunk
        self._checked_on_device = False
        attention = attention or partial(BurstAttention, mask="causal")
        norm = partial(RMSNorm, eps=config.norm_eps, dtype=dtype, kernel=norm_kernel)
        memory = host_memory or HostMemory()
        self.model = LlamaModel(
            *(config, attention, dtype, policy, zero_level, tensor, mlp_chunk, norm, offload_weights, memory, lora)
        )
        layout = getattr(getattr(self.model.layers[0].self_attn.attention, "options", None), "layout", None)
        if config.sliding_window is not None and layout == "balanced":
            raise UserError(
                "layout 'balanced' is made for the mask of a batch and cannot be combined with sliding_window\n"
                "fix: layout 'zigzag' or 'striped', or sliding_window none"
            )
        if not config.tie_embeddings:
            self.lm_head = Table(config.vocab_size, config.hidden_size, dtype=dtype)
            if lora is not None:
                freeze(self.lm_head)
        if seed is not None:
            initialize(self, config, seed)

    def forward(
        self, tokens: Tensor, positions: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return the final hidden states of this rank's tokens, `[batch, tokens, hidden_size]`, as input of the head.

        They are the output of the last norm times `config.logit_scale`, which is 1 except in MiniCPM. Ranks of a tensor
        group return the same. Gradients sum over ranks, so count each token's loss on one of them, as `loss` does.

        Args:
            tokens: `[batch, tokens]` int64, this rank's part.
            positions: `[batch, tokens]` int64, of each token in the whole sequence, or in its document.
            length: Real tokens of the whole sequence over all ranks, where padding follows them. Default: the length of
                the mask, or all tokens.
            mask: Mask of this batch, as in `burst_attention`. Default: the mask of the attention modules.

        Raises:
            UserError: A token id is out of range. Checked in every pass on a CPU and in the first pass on a GPU.
        """
        hidden = self._hidden(tokens, positions, length, self.model.embed_tokens.weight, mask)
        return self.tensor.gather(hidden, tokens.shape[1])

    def logits(
        self, tokens: Tensor, positions: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return the logits of all tokens, `[batch, tokens, vocab_size]`, for short inputs. See `forward`."""
        embedding = self.model.embed_tokens.weight
        hidden = self.tensor.gather(self._hidden(tokens, positions, length, embedding, mask), tokens.shape[1])
        return torch.nn.functional.linear(hidden, self._head(embedding))

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab_size]` of a few tokens' hidden states, as `forward` returns them."""
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
    ) -> Tensor:
        """Return the sum of this rank's token losses in nats, a scalar in fp32 or wider.

        Pass it through `bmburst.loss.global_mean` to BMTrain's `OptimManager.backward`. In a tensor group each token
        counts on one rank, so losses sum over all ranks of the world.

        Args:
            tokens: See `forward`, as `positions` and `length`.
            positions: See `forward`.
            labels: `[batch, tokens]` int64, the token that follows each; `bmburst.loss.IGNORE_INDEX` for no loss.
            length: See `forward`.
            mask: See `forward`.
            per_token: Whether losses are returned for each of this rank's tokens. The backward pass then computes the
                logits again.

        Raises:
            UserError: A token id or label is out of range.
        """
        first = not self._checked_on_device
        embedding = self.model.embed_tokens.weight
        hidden = self._hidden(tokens, positions, length, embedding, mask)
        head = self._head(embedding)
        del embedding  # memory can be the fullest in the loss, which reads the head alone
        own = self.tensor.own(labels, pad_value=IGNORE_INDEX)
        check = first or not labels.is_cuda
        return token_loss_sum(hidden, head, own, chunk=self.loss_chunk, check=check, per_token=per_token)

    def _hidden(
        self, tokens: Tensor, positions: Tensor, length: int | None, embedding: Tensor, mask: MaskOption | None
    ) -> Tensor:
        if tokens.shape != positions.shape or tokens.dim() != 2:
            raise UserError(
                f"tokens {tuple(tokens.shape)} and positions {tuple(positions.shape)} differ in shape\n"
                "fix: both [batch, tokens]"
            )
        if not (tokens.is_cuda and self._checked_on_device):
            require_ids("token id", tokens, self.config.vocab_size)
            self._checked_on_device = True
        hidden: Tensor = self.model(tokens, positions, length, embedding, mask)
        return hidden

    def _head(self, embedding: Tensor) -> Tensor:
        """Return the head's weight: gathered here, or the embedding gathered before, so that it is gathered once."""
        if self.config.tie_embeddings:
            return embedding
        weight: Tensor = self.lm_head.weight
        return weight


def _require_norm(kernel: str, config: LlamaConfig, dtype: torch.dtype) -> None:
    if kernel == "auto":
        return
    for features in (config.hidden_size, config.head_dim) if config.qk_norm else (config.hidden_size,):
        row = torch.empty(features, dtype=dtype).cuda()  # as BMTrain places parameters
        try:
            choose_norm(kernel, row, row)
        except KernelError as error:
            raise UserError(str(error)) from None


def within(window: int | None, mask: MaskOption | None) -> MaskOption | None:
    """Return a batch's mask narrowed to the model's sliding window.

    Args:
        window: The configuration's `sliding_window`; None leaves the mask as it is.
        mask: Mask of the batch. None: the attention modules' mask, which must be causal with a window.
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
