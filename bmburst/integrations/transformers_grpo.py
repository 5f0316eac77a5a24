"""GRPO and RLOO of TRL on split sequences.

Every rank keeps its own rows, as in TRL: the sampler, generation, rewards and advantages are TRL's, and so are steps
and batches. Only the model's calls for log-probabilities change. The ranks of a sequence group compute the rows of one
of them together, then those of the next one. So a rank holds the activations of a part of one rank's rows at a time,
and the result is that of TRL on the same processes.

Rows are packed without padding. The head returns log-probabilities and entropies, which are gathered; then every rank
of the group computes TRL's own loss of these rows, and backward takes the gradient of its own tokens. The mean over all
ranks, which DDP and FSDP2 compute, is that of the ranks' losses. With `share_prompts` the rows of all ranks of a group
are computed at once as prefix trees; the losses are those of each rank in turn. docs/hugging_face.md is the guide.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bmburst.amounts import require_flag
from bmburst.errors import UserError, first_line, one_line, with_fix
from bmburst.integrations.grpo_arguments import ALLOWED, ARGUMENTS
from bmburst.integrations.grpo_rows import (
    Rows,
    Values,
    as_documents,
    as_trees,
    require_wide,
    require_wide_rows,
    rows_of_ranks,
    with_lengths_of_trl,
)
from bmburst.integrations.trainer_arguments import is_library, require_read, require_trl, require_understood
from bmburst.integrations.trainer_decisions import DecidesTogether
from bmburst.integrations.transformers import NAME, SplitSequences
from bmburst.integrations.transformers_models import require_splittable
from bmburst.integrations.transformers_modules import outermost
from bmburst.integrations.transformers_recurrent import require_layout
from bmburst.integrations.transformers_router import require_router_loss, router_share, router_shares
from bmburst.integrations.transformers_trainer import require_known_engine, require_split, still_to_be_prepared
from bmburst.mesh import Mesh
from bmburst.recompute import checkpoint

__all__ = ["SplitRows"]


class SplitRows(DecidesTogether):
    """Makes TRL's GRPOTrainer or RLOOTrainer compute on split sequences: `class Split(SplitRows, GRPOTrainer): pass`.

    Args:
        arguments: Positional arguments of the trainer.
        split: Splits the rows.
        generate_with: The attn_implementation of the policy while it generates, and of reward models: every rank
            generates its own completions, alone.
        share_prompts: Whether to compute the rows of all ranks of a group at once, as prefix trees
            (`bmburst.pack_tree`). Tokens that rows have in common at their beginning are read once. A rank then holds
            activations of its part of all these rows, not of one rank's. Not for models whose layers have windows
            shorter than a row, or a recurrent state.
        options: Further arguments of the trainer.

    Raises:
        UserError: TRL is of another version, the trainer is none of the two, the model is not exact on split sequences,
            an argument is set that is not exact on them or not known, or one of these arguments has another type.
    """

    def __init__(
        self,
        *arguments: Any,
        split: SplitSequences,
        generate_with: str = "sdpa",
        share_prompts: bool = False,
        **options: Any,
    ) -> None:
        kind = require_read(
            type(self),
            SplitRows,
            read=("GRPOTrainer", "RLOOTrainer"),
            replaced="_get_per_token_logps_and_entropies",
            by="log-probabilities of split rows",
            others="for SFTTrainer the mixin SplitBatches (docs/hugging_face.md)",
            in_turns="compute_loss",
        )
        require_trl(kind)
        require_split(split)
        require_flag("share_prompts", share_prompts)
        super().__init__(*arguments, **options)
        self.split, self._generate_with, self._share_prompts = split, generate_with, share_prompts
        self._trainer: Any = self  # untyped access to the trainer's attributes
        self._turns: _OwnRows | None = None
        """The turns of a loss, in which all ranks of the group hold the same rows; None outside a loss."""
        require_understood(self, [name for name, value in options.items() if value is not None], ALLOWED, ARGUMENTS)
        require_known_engine(self._trainer)
        _require_exact(self._trainer, split.options.layout, share_prompts)
        _require_turns_alone(self._trainer, split.mesh.world.size)
        self._policies = _policies(self)
        _set_attention(self, generate_with)
        _require_tokens(self._trainer, split.mesh)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: object = None
    ) -> Tensor:
        """Return the loss of this rank's rows, as TRL computes it.

        Where gradients are computed, those of the rows of all ranks of the group but the last are added to the weights
        here. Backward of the result adds those of the last rank's rows. With `share_prompts` it adds those of all rows.
        """
        del num_items_in_batch  # TRL counts tokens itself
        trainer, comm = self._trainer, self.split.mesh.sequence
        ranks = rows_of_ranks(self.split.mesh, inputs)
        for layer, policy in self._policies if torch.is_grad_enabled() else ():  # TRL enables its own after generation
            layer._gradient_checkpointing_func, layer.gradient_checkpointing = policy, True
        loss = own = torch.zeros(())
        with _shared_rows(trainer, ranks) as turns:
            for rank, rows in enumerate(ranks):
                is_last = rank == comm.size - 1
                goes_on = not is_last and not self._share_prompts  # to the next backward
                # FSDP2 would keep whole gradients instead of its shards.
                with model.no_sync() if isinstance(model, DistributedDataParallel) and goes_on else nullcontext():
                    turns.begin(rank, is_own=rank == comm.rank, is_last=is_last)
                    with turns.without_others():
                        of_rank = super().compute_loss(model, rows, return_outputs)  # type: ignore[misc]
                    turns.require_known(self.split.mesh, of_rank)
                    loss = loss + of_rank if self._share_prompts and rank else of_rank
                    if rank == comm.rank:
                        own = of_rank.detach()
                    if torch.is_grad_enabled() and goes_on:
                        scaled = trainer.loss_is_scaled_for_ga
                        turns.accelerator.backward(
                            loss if scaled else loss / trainer.current_gradient_accumulation_steps
                        )
        shown: Tensor = _Shown.apply(loss, own)  # type: ignore[no-untyped-call]
        return shown

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Run the trainer's own loop, so that an evaluation before the training does not prepare the model for it."""
        with still_to_be_prepared(self._trainer):
            return super().evaluation_loop(*arguments, **options)

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        with _attention(self._trainer.model, self._generate_with):
            return super()._generate_single_turn(*arguments, **options)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probabilities and entropies of completions, `[rows, logits_to_keep]`, 0 at padding.

        The third is the router's loss of the rows, or None.

        In a loss all ranks of the group hold the same rows. Elsewhere, for the old and reference log-probabilities,
        each rank holds its own, and its result is that of its own rows.
        """
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise UserError(
                f"rows with {given[0]} are not computed on split sequences\nallowed: text\nfix: a text-only data set"
            )
        turns, rows = self._turns, Rows(input_ids, attention_mask, logits_to_keep)
        if turns is None:
            return *self._own_logps(model, rows, batch_size, compute_entropy), None
        if not self._share_prompts:
            values, of_router = self._logps(model, [rows], compute_entropy, routed=compute_aux_loss)
            return *values[0], of_router
        if turns.values is None:
            turns.values, _ = self._logps(model, list(map(Rows.of, turns.rows)), compute_entropy)
        return *turns.values[turns.rank], None

    def _own_logps(self, model: nn.Module, mine: Rows, batch_size: int | None, entropy: bool) -> Values:
        """Return the values of this rank's rows, where each rank of the group holds its own; collective."""
        prompt = mine.ids.shape[1] - mine.keep
        rows = {
            "prompt_ids": mine.ids[:, :prompt],
            "completion_ids": mine.ids[:, prompt:],
            "prompt_mask": mine.mask[:, :prompt],
            "completion_mask": mine.mask[:, prompt:],
        }
        ranks = map(Rows.of, rows_of_ranks(self.split.mesh, rows))
        parts = [[(rank, part) for part in each.split(batch_size or len(each.ids))] for rank, each in enumerate(ranks)]
        calls = [[part] for each in parts for part in each]
        if self._share_prompts:
            calls = [[part for part in each if part is not None] for each in zip_longest(*parts)]
        found: list[Values] = []
        for call in calls:
            values, _ = self._logps(model, [part for _, part in call], entropy)
            own = self.split.mesh.sequence.rank
            found += [value for (rank, _), value in zip(call, values, strict=True) if rank == own]
        _reshard_frozen(model, self._trainer.optimizer)
        logps, entropies = zip(*found, strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None

    def _logps(
        self, model: nn.Module, rows: list[Rows], entropy: bool, *, routed: bool = False
    ) -> tuple[list[Values], Tensor | None]:
        """Return the values of rows that all ranks of the group hold, computed in one call of the model.

        With `routed`, also the router's loss of the rows, on every rank. Backward takes the gradient of own tokens.
        """
        if self._share_prompts:
            require_wide_rows(self.split.mesh, model, rows)
        part, placed = (as_trees if self._share_prompts else as_documents)(self.split, rows)
        part = with_lengths_of_trl(part, rows, model)
        comm, asked = self.split.mesh.sequence, {"output_router_logits": True} if routed else {}
        with (
            self._trainer.accelerator.autocast(),
            router_shares(model if routed else None, part.real, comm) as shares,
        ):
            logps, entropies = part.logps(model, temperature=self._trainer.temperature, entropy=entropy, **asked)
        of_router = None
        if routed:
            share = router_share(model, shares)
            (total,) = comm.all_reduce(share.detach()).wait()
            of_router = _Shown.apply(share, total)  # type: ignore[no-untyped-call]
        # As TRL's, also of fp64 weights: it gathers what it computes of them with values of its own in fp32.
        logps, entropies = logps.float(), None if entropies is None else entropies.float()
        none: list[Tensor | None] = [None] * len(rows)
        return list(zip(placed(logps), none if entropies is None else placed(entropies), strict=True)), of_router


class _OwnRows:
    """Stands in for a trainer's accelerator while ranks compute the rows of each of them in turn.

    TRL reduces and gathers over all ranks what it logs of the rows. With the rows of one rank of each group at a time,
    it would log those of the last turn only. So each rank keeps what TRL passes in the turn of the rank's own rows,
    and passes that in the last turn. The metrics of earlier turns are dropped.

    Before the last turn, what ranks would gather is not known. Methods of the caller's own classes get NaN then, and a
    loss that depends on it is refused.

    Args:
        trainer: The trainer.
        rows: The rows of every rank of the group.

    Attributes:
        rank: The rank whose turn it is.
        values: The values of the rows of every rank, if they were computed at once.
    """

    def __init__(self, trainer: Any, rows: list[dict[str, Tensor]]) -> None:
        self.accelerator, self.rows, self.rank = trainer.accelerator, rows, 0
        self.values: list[Values] | None = None
        self._trainer, self._metrics = trainer, trainer._metrics
        self._kept: list[Any] = []
        self._calls = 0
        self._is_own = self._is_last = False
        self._changed = _changed_class(type(trainer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def begin(self, rank: int, *, is_own: bool, is_last: bool) -> None:
        """Begin the turn of a rank: whether the rows are this rank's own, and whether it is the last turn."""
        self.rank = rank
        self._calls, self._is_own, self._is_last = 0, is_own, is_last
        dropped: dict[str, Any] = {mode: defaultdict(list) for mode in self._metrics}
        self._trainer._metrics = self._metrics if is_last else dropped

    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        """See `Accelerator.reduce`."""
        return self._own(lambda mine: self.accelerator.reduce(mine, *arguments, **options), tensor)

    def gather(self, tensor: Any) -> Any:
        """See `Accelerator.gather`."""
        return self._own(self.accelerator.gather, tensor)

    def gather_for_metrics(self, tensor: Any) -> Any:
        """See `Accelerator.gather_for_metrics`."""
        return self._own(self.accelerator.gather_for_metrics, tensor)

    def _own(self, collective: Callable[[Any], Any], tensor: Any) -> Any:
        if self._is_own:
            self._kept.append(tensor)
        self._calls += 1
        if self._is_last:
            return collective(self._kept[self._calls - 1])
        return tensor if self._changed is None else recursively_apply(_unknown, tensor)

    @contextmanager
    def without_others(self) -> Iterator[None]:
        """Inside this block, methods of the caller's own that cannot compute with NaN are refused by name."""
        try:
            yield
        except (IndexError, TypeError, ValueError) as error:
            if isinstance(error, UserError) or self._changed is None or self._is_last:
                raise
            raise self._dependent(f"fails ({one_line(error)})") from error

    def require_known(self, mesh: Mesh, loss: Tensor) -> None:
        """Check that the loss of a turn does not depend on what ranks gather. Collective over all ranks.

        Raises:
            UserError: It is not a number before the last turn, in a trainer with methods of the caller's own.
        """
        if self._changed is None or self._is_last:
            return

        def decide() -> tuple[None, str]:
            if bool(loss.isnan().any()):
                raise self._dependent("is NaN")
            return None, "loss of a turn"

        with mesh.world.checking():
            mesh.world.decided(decide)

    def _dependent(self, what: str) -> UserError:
        return UserError(
            f"the loss of {self._changed} {what} without what it gathers or reduces over ranks, which compute their "
            "rows in turn\n"
            "allowed: losses of the rows of a rank, and metrics of what is gathered, as floats\n"
            "fix: leave what is gathered out of the loss; the advantages of rows may hold factors"
        )


def _unknown(tensor: Tensor) -> Tensor:
    return tensor.new_full(tensor.shape, math.nan, dtype=tensor.dtype if tensor.is_floating_point() else torch.float64)


def _changed_class(trainer: type) -> str | None:
    """Return the name of a class of the caller's own that has methods, or None."""
    for owner in trainer.__mro__:
        is_own = not is_library(owner) and owner.__module__.split(".")[0] not in ("builtins", "bmburst")
        if is_own and any(callable(value) for name, value in vars(owner).items() if not name.startswith("__")):
            return owner.__name__
    return None


class _Shown(torch.autograd.Function):
    """A loss that shows the value of another one.

    The gradient of a step's loss is that of the last rows, and the log's value is that of own rows. The gradient of the
    router's loss is that of own tokens, and the value is that of all.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shown: Tensor) -> Tensor:
        del ctx, loss
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


@contextmanager
def _shared_rows(trainer: Any, rows: list[dict[str, Tensor]]) -> Iterator[_OwnRows]:
    """Inside this block, all ranks of a group hold the same rows: those of every rank, in turn."""
    turns = _OwnRows(trainer, rows)
    accelerator, metrics = trainer.accelerator, trainer._metrics
    trainer.accelerator, trainer._turns = turns, turns
    try:
        yield turns
    finally:
        trainer.accelerator, trainer._metrics, trainer._turns = accelerator, metrics, None


@contextmanager
def _attention(model: nn.Module, name: str) -> Iterator[None]:
    """Inside this block, a model has another attention if it has bmburst's."""
    found = outermost(model)
    if found is None or found.config._attn_implementation != NAME:
        yield
        return
    try:
        found.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{type(found).__name__} cannot generate with attention {name!r}: {first_line(error)}\n"
            'allowed: an attn_implementation of transformers\nfix: generate_with="eager"'
        ) from None
    try:
        yield
    finally:
        found.set_attn_implementation(NAME)


def _set_attention(trainer: Any, name: str) -> None:
    """Check that the policy can generate with an attention, and give it to reward models that have bmburst's.

    Raises:
        UserError: A model does not have this attention.
    """
    if not isinstance(name, str) or name == NAME:
        raise UserError(
            f"generate_with is {name!r}, but each rank generates its own completions, alone\n"
            'allowed: an attn_implementation of transformers\nfix: generate_with="sdpa"'
        )
    with _attention(trainer.model, name):
        pass
    for model in trainer.reward_funcs:
        if isinstance(model, PreTrainedModel) and model.config._attn_implementation == NAME:
            model.set_attn_implementation(name)


def _require_tokens(trainer: Any, mesh: Mesh) -> None:
    """Let a `rollout_func` refuse, on all ranks, an answer without a token: TRL would fail on its rank only."""
    rollout: Any = getattr(trainer, "rollout_func", None)

    def checked(prompts: Any, trainer: Any) -> Any:
        found = rollout(prompts, trainer)

        def decide() -> tuple[None, str]:
            if not all(map(len, found.get("completion_ids", ()))):
                raise UserError(
                    f"rollout_func returned an answer without a token on rank {mesh.world.rank}\n"
                    "allowed: one token or more in each of completion_ids\nfix: end an empty answer with the eos token"
                )
            return None, "answers of rollout_func"

        with mesh.world.checking():
            mesh.world.decided(decide)
        return found

    if rollout is not None:
        trainer.rollout_func = checked


def _policies(trainer: Any) -> list[tuple[GradientCheckpointingLayer, Any]]:
    """Return the layers of a model that `recompute` has set, and their functions."""
    layers = (module for module in trainer.model.modules() if isinstance(module, GradientCheckpointingLayer))
    found = ((layer, getattr(layer, "_gradient_checkpointing_func", None)) for layer in layers)
    return [(layer, policy) for layer, policy in found if isinstance(policy, partial) and policy.func is checkpoint]


def _reshard_frozen(model: nn.Module, optimizer: Any) -> None:
    """Reshard a model of FSDP2 whose pass had weights frozen that are trained: adapters, disabled for the reference.

    FSDP2 keeps the weights of its root after a forward pass. PEFT would enable those that are then in the modules, not
    the shards, which stay frozen and freeze the weights of the next pass.
    """
    if optimizer is not None and any(not w.requires_grad for each in optimizer.param_groups for w in each["params"]):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _require_exact(trainer: Any, layout: str, share_prompts: bool) -> None:
    """Check the model, and what TRL has read from it.

    Raises:
        UserError: It is not exact on split sequences.
    """
    if trainer._is_vlm:
        raise UserError("rows with images are not computed on split sequences\nallowed: a tokenizer\nfix: a text model")
    if trainer.aux_loss_enabled:
        try:
            require_router_loss(trainer.model, is_tree=share_prompts)
        except UserError as error:
            raise with_fix(error, "router_aux_loss_coef=0.0 in the configuration of the trainer") from None
    if getattr(trainer.model.config, "use_kernels", False) or getattr(trainer.model, "use_kernels", False):
        raise UserError(
            "kernels of a hub may replace layers of the model\nallowed: use_kernels=False\nfix: leave it out"
        )
    for model in filter(None, (trainer.model, trainer.ref_model)):
        require_layout(require_splittable(model, lambda: (1,)), layout, is_tree=share_prompts)
        if share_prompts:
            require_wide(model, trainer.args.max_completion_length)


def _require_turns_alone(trainer: Any, ranks: int) -> None:
    """Check that no rank waits for the others where its rows call tools in more turns than theirs.

    TRL lets each rank generate as many turns as its rows need.

    Raises:
        UserError: Ranks generate together.
    """
    if ranks == 1 or not getattr(trainer, "tools", None):  # RLOOTrainer has none
        return
    if getattr(trainer, "use_vllm", False):
        together = trainer.vllm_mode != "colocate" or trainer.vllm_tensor_parallel_size != 1
        how = f"vllm_mode={trainer.vllm_mode!r}, vllm_tensor_parallel_size={trainer.vllm_tensor_parallel_size}"
    else:
        together, how = trainer.is_fsdp_enabled, "FSDP2"
    if together:
        raise UserError(
            f"tools with {how}: ranks generate together, but each has as many turns as its rows call tools\n"
            "allowed: DDP; or vllm_mode='colocate' and vllm_tensor_parallel_size=1\nfix: one of these"
        )
