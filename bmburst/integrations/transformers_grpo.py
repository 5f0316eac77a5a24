"""GRPO and RLOO of TRL on split sequences.

Every rank keeps its own rows, as in TRL: the sampler, generation, rewards and advantages are TRL's, and so are steps
and batches. Only the model's calls for log-probabilities change. The ranks of a sequence group compute the rows of one
of them together, then those of the next one. So a rank holds the activations of a part of one rank's rows at a time,
and the result is that of TRL on the same processes.

Rows are packed without padding. The head returns log-probabilities and entropies, which are gathered; then every rank
of the group computes TRL's own loss of these rows, and backward takes the gradient of its own tokens. The mean over all
ranks, which DDP and FSDP2 compute, is that of the ranks' losses. docs/hugging_face.md is the guide.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError
from bmburst.integrations.grpo_arguments import ALLOWED, ARGUMENTS
from bmburst.integrations.trainer_arguments import is_library, require_understood
from bmburst.integrations.transformers import NAME, SplitSequences
from bmburst.integrations.transformers_models import require_splittable
from bmburst.integrations.transformers_trainer import require_known_engine, still_to_be_prepared
from bmburst.mesh import Mesh
from bmburst.recompute import checkpoint
from bmburst.schedule.documents import Documents
from bmburst_ops import IGNORE_INDEX

__all__ = ["SplitRows"]

TRL = "1.16."
"""The version of TRL whose methods were read."""

_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_REPLACED = "_get_per_token_logps_and_entropies"
_KEYS = frozenset(
    {
        "advantages",
        "completion_ids",
        "completion_mask",
        "importance_sampling_ratio",
        "num_items_in_batch",
        "old_logps",
        "old_per_token_logps",
        "prompt_ids",
        "prompt_mask",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
    }
)
"""What the rows of a micro-batch may hold."""


class SplitRows:
    """Makes TRL's GRPOTrainer or RLOOTrainer compute on split sequences: `class Split(SplitRows, GRPOTrainer): pass`.

    Args:
        arguments: Positional arguments of the trainer.
        split: Splits the rows.
        generate_with: The attn_implementation of the policy while it generates, and of reward models: every rank
            generates its own completions, alone.
        options: Further arguments of the trainer.

    Raises:
        UserError: TRL is of another version, the trainer is none of the two, the model is not exact on split sequences,
            or an argument is set that is not exact on them or not known.
    """

    def __init__(self, *arguments: Any, split: SplitSequences, generate_with: str = "sdpa", **options: Any) -> None:
        _require_read(type(self))
        super().__init__(*arguments, **options)
        self.split, self._generate_with = split, generate_with
        self._trainer: Any = self  # untyped access to the trainer's attributes
        self._is_shared = False
        """Whether all ranks of the group hold the same rows at present."""
        require_understood(self, [name for name, value in options.items() if value is not None], ALLOWED, ARGUMENTS)
        require_known_engine(self._trainer)
        _require_exact(self._trainer)
        self._policies = _policies(self)
        _set_attention(self, generate_with)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: object = None
    ) -> Tensor:
        """Return the loss of this rank's rows, as TRL computes it.

        Where gradients are computed, those of the rows of all ranks of the group but the last are added to the weights
        here. Backward of the result adds those of the last rank's rows.
        """
        del num_items_in_batch  # TRL counts tokens itself
        trainer, comm = self._trainer, self.split.mesh.sequence
        ranks = _rows_of_ranks(self.split.mesh, inputs)
        for layer, policy in self._policies if torch.is_grad_enabled() else ():  # TRL enables its own after generation
            layer._gradient_checkpointing_func, layer.gradient_checkpointing = policy, True
        loss = own = torch.zeros(())
        with _shared_rows(trainer) as turns:
            for rank, rows in enumerate(ranks):
                is_last = rank == comm.size - 1
                # FSDP2 would keep whole gradients instead of its shards.
                with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
                    turns.begin(is_own=rank == comm.rank, is_last=is_last)
                    loss = super().compute_loss(model, rows, return_outputs)  # type: ignore[misc]
                    if rank == comm.rank:
                        own = loss.detach()
                    if torch.is_grad_enabled() and not is_last:
                        scaled = trainer.loss_is_scaled_for_ga
                        turns.accelerator.backward(
                            loss if scaled else loss / trainer.current_gradient_accumulation_steps
                        )
        shown: Tensor = _Shown.apply(loss, own)  # type: ignore[no-untyped-call]
        return shown

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Run the trainer's own loop, so that an evaluation before the training does not prepare the model for it."""
        with still_to_be_prepared(self._trainer):
            return super().evaluation_loop(*arguments, **options)  # type: ignore[misc]

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
        """Return log-probabilities and entropies of completions, `[rows, logits_to_keep]`, 0 at padding, and None.

        In a loss all ranks of the group hold the same rows. Elsewhere, for the old and reference log-probabilities,
        each rank holds its own, and its result is that of its own rows.
        """
        given = [name for name, value in others.items() if value is not None]
        if given or compute_aux_loss:
            raise UserError(
                f"rows with {given[0] if given else 'a loss of the router'} are not computed on split sequences\n"
                "allowed: text\nfix: a text-only data set, and router_aux_loss_coef=0.0"
            )
        if self._is_shared:
            return *self._logps(model, input_ids, attention_mask, logits_to_keep, compute_entropy), None
        found: list[tuple[Tensor, Tensor | None]] = []
        mine = {"prompt_ids": input_ids[:, :-logits_to_keep], "completion_ids": input_ids[:, -logits_to_keep:]}
        masks = {
            "prompt_mask": attention_mask[:, :-logits_to_keep],
            "completion_mask": attention_mask[:, -logits_to_keep:],
        }
        for rank, rows in enumerate(_rows_of_ranks(self.split.mesh, mine | masks)):
            ids = torch.cat((rows["prompt_ids"], rows["completion_ids"]), 1).split(batch_size or len(input_ids))
            mask = torch.cat((rows["prompt_mask"], rows["completion_mask"]), 1).split(batch_size or len(input_ids))
            keep = rows["completion_ids"].shape[1]
            parts = [self._logps(model, *pair, keep, compute_entropy) for pair in zip(ids, mask, strict=True)]
            if rank == self.split.mesh.sequence.rank:
                found = parts
        logps, entropies = zip(*found, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _logps(
        self, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities and entropies of rows that all ranks of the group hold."""
        real = mask.bool()
        lengths = tuple(length for length in real.sum(1).tolist() if length)
        labels = ids.masked_fill(~real, IGNORE_INDEX)
        labels[:, :-keep] = IGNORE_INDEX
        part = self.split.part(ids[real][None], labels=labels[real][None], documents=Documents(lengths))

        def placed(local: Tensor) -> Tensor:
            whole = part.gathered(local)[0].roll(1)  # a label is the token behind
            return whole.new_zeros(ids.shape).masked_scatter(real, whole)[:, -keep:]

        with self._trainer.accelerator.autocast():
            logps, entropies = part.logps(model, temperature=self._trainer.temperature, entropy=entropy)
        return placed(logps), None if entropies is None else placed(entropies)


class _OwnRows:
    """Stands in for a trainer's accelerator while ranks compute the rows of each of them in turn.

    TRL reduces and gathers over all ranks what it logs of the rows. With the rows of one rank of each group at a time,
    it would log those of the last turn only. So each rank keeps what TRL passes in the turn of the rank's own rows,
    and passes that in the last turn. The metrics of earlier turns are dropped.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.accelerator = trainer.accelerator
        self._trainer, self._metrics = trainer, trainer._metrics
        self._kept: list[Any] = []
        self._calls = 0
        self._is_own = self._is_last = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def begin(self, *, is_own: bool, is_last: bool) -> None:
        """Begin a turn: whether the rows are this rank's own, and whether it is the last turn."""
        self._calls, self._is_own, self._is_last = 0, is_own, is_last
        dropped: dict[str, Any] = {mode: defaultdict(list) for mode in self._metrics}
        self._trainer._metrics = self._metrics if is_last else dropped

    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        """See `Accelerator.reduce`."""
        return self._own(lambda mine: self.accelerator.reduce(mine, *arguments, **options), tensor)

    def gather(self, tensor: Any) -> Any:
        """See `Accelerator.gather`."""
        return self._own(self.accelerator.gather, tensor)

    def _own(self, collective: Callable[[Any], Any], tensor: Any) -> Any:
        if self._is_own:
            self._kept.append(tensor)
        self._calls += 1
        return collective(self._kept[self._calls - 1]) if self._is_last else tensor


class _Shown(torch.autograd.Function):
    """A loss that shows the value of another one: the gradient is that of the last rows, the log's value is own."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shown: Tensor) -> Tensor:
        del ctx, loss
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


@contextmanager
def _shared_rows(trainer: Any) -> Iterator[_OwnRows]:
    """Inside this block, all ranks of a group hold the same rows."""
    turns = _OwnRows(trainer)
    accelerator, metrics = trainer.accelerator, trainer._metrics
    trainer.accelerator, trainer._is_shared = turns, True
    try:
        yield turns
    finally:
        trainer.accelerator, trainer._metrics, trainer._is_shared = accelerator, metrics, False


def _rows_of_ranks(mesh: Mesh, mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the rows of every rank of this rank's sequence group. Collective over all ranks; the host waits.

    Args:
        mesh: The ranks.
        mine: This rank's rows: tensors with at most two dimensions, with equal names and dtypes on all ranks.

    Raises:
        UserError: A name is not known, or a prompt has no token.
        Mismatch: The ranks hold different kinds of rows.
    """
    names = sorted(mine)

    def decide() -> tuple[None, str]:
        if unknown := sorted({*names} - _KEYS):
            raise UserError(
                f"rows have {unknown[0]}, which is not known on split sequences\nallowed: {', '.join(sorted(_KEYS))}\n"
                "fix: text, without images"
            )
        if not bool(mine["prompt_mask"].any(1).all()):
            raise UserError("a prompt has no token\nallowed: one or more\nfix: prompts that begin with a token")
        kinds = [f"{name} {mine[name].dtype} of {mine[name].dim()}" for name in names]
        return None, "\n".join(["rows of a micro-batch", *kinds])

    with mesh.world.checking():
        mesh.world.decided(decide)
    comm: CheckedCommunicator = mesh.sequence
    shapes = torch.tensor([[*mine[name].shape, 1, 1][:2] for name in names], device=comm.device)
    (every,) = comm.all_gather(shapes).wait()
    sizes = [mine[name].element_size() for name in names]
    nbytes = [
        [rows * columns * size for (rows, columns), size in zip(rank, sizes, strict=True)] for rank in every.tolist()
    ]
    data = torch.cat([mine[name].contiguous().reshape(-1).view(torch.uint8) for name in names]).to(comm.device)
    padded = nn.functional.pad(data, (0, max(map(sum, nbytes)) - len(data)))
    (gathered,) = comm.all_gather(padded).wait()
    found = []
    for row, shape, counts in zip(gathered, every.tolist(), nbytes, strict=True):
        pieces = row[: sum(counts)].split(counts)
        found.append(
            {
                name: piece.clone().view(mine[name].dtype).reshape(size[: mine[name].dim()])
                for name, piece, size in zip(names, pieces, shape, strict=True)
            }
        )
    return found


@contextmanager
def _attention(model: nn.Module, name: str) -> Iterator[None]:
    """Inside this block, a model has another attention if it has bmburst's."""
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None or found.config._attn_implementation != NAME:
        yield
        return
    try:
        found.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{type(found).__name__} cannot generate with attention {name!r}: {str(error).splitlines()[0]}\n"
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
    with _attention(trainer.model, name):
        pass
    for model in trainer.reward_funcs:
        if isinstance(model, PreTrainedModel) and model.config._attn_implementation == NAME:
            model.set_attn_implementation(name)


def _policies(trainer: Any) -> list[tuple[GradientCheckpointingLayer, Any]]:
    """Return the layers of a model that `recompute` has set, and their functions."""
    layers = (module for module in trainer.model.modules() if isinstance(module, GradientCheckpointingLayer))
    found = ((layer, getattr(layer, "_gradient_checkpointing_func", None)) for layer in layers)
    return [(layer, policy) for layer, policy in found if isinstance(policy, partial) and policy.func is checkpoint]


def _require_read(trainer: type) -> None:
    """Check that a trainer's methods were read, before it reads the data.

    Raises:
        UserError: They were not.
    """
    kind = next((each.__name__ for each in trainer.__mro__ if is_library(each)), "none")
    if kind not in _TRAINERS:
        raise UserError(
            f"the methods of {kind} were not read, so it is not known to be exact on split sequences\n"
            f"allowed: {', '.join(_TRAINERS)}\n"
            "fix: for SFTTrainer SplitBatches (docs/hugging_face.md); for pairs, bmburst train (docs/fine_tuning.md)"
        )
    installed = version("trl")
    if not installed.startswith(TRL):
        raise UserError(
            f"TRL is {installed}, whose {kind} was not read\nallowed: {TRL}*\nfix: pip install 'trl>=1.16,<1.17'"
        )
    behind = trainer.__mro__[trainer.__mro__.index(SplitRows) + 1 :]
    own = next((each for each in behind if _REPLACED in vars(each) and not is_library(each)), None)
    if own is not None:
        raise UserError(
            f"{own.__name__} defines {_REPLACED}, which SplitRows replaces\n"
            "fix: a trainer without it, or without SplitRows"
        )


def _require_exact(trainer: Any) -> None:
    """Check the model, and what TRL has read from it.

    Raises:
        UserError: It is not exact on split sequences.
    """
    if trainer._is_vlm:
        raise UserError("rows with images are not computed on split sequences\nallowed: a tokenizer\nfix: a text model")
    if "lomo" in trainer.args.optim:
        raise UserError(
            f"optim={str(trainer.args.optim.value)!r} steps in each backward, but ranks that share rows have one each\n"
            "fix: another optimizer, such as optim='adamw_torch'"
        )
    if trainer.aux_loss_enabled:
        raise UserError(
            "the loss of the model's router is no sum over tokens\nallowed: router_aux_loss_coef=0.0\n"
            "fix: set it in the configuration of the trainer"
        )
    if getattr(trainer.model.config, "use_kernels", False) or getattr(trainer.model, "use_kernels", False):
        raise UserError(
            "kernels of a hub may replace layers of the model\nallowed: use_kernels=False\nfix: leave it out"
        )
    if any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
        raise UserError(
            "prompt learning of PEFT adds tokens to each rank's part of a sequence\n"
            "allowed: adapters of layers\nfix: LoraConfig"
        )
    for model in filter(None, (trainer.model, trainer.ref_model)):
        require_splittable(model, lambda: (1,))
