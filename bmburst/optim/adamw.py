"""AdamW on BMTrain's ZeRO shards, with its state on the GPU or in host memory: `AdamW`, `build_optimizer`."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, get_args

import bmtrain as bmt
import torch

from bmburst.blocks.kinds import KINDS, MATRICES, OUTWARD, kind_of
from bmburst.comm.host_memory import host_shard
from bmburst.errors import UserError, require_known
from bmburst.optim.config import Kernel, OptimizerConfig, require_kernel
from bmburst.optim.states import (
    DTYPES,
    MASTER,
    MEAN,
    REMAINDER,
    SCALES,
    SQUARE,
    STEP,
    Part,
    initial_state,
    moment,
    part_of_all,
    parts_of,
    set_moment,
)
from bmburst.optim.updates import (
    HostAdam,
    LateUpdates,
    ShardUpdate,
    Update,
    step_fused,
    step_plain,
    step_small,
    step_wide,
)
from bmburst.zero import NamedShard, named_shards, scatter_piece
from bmburst_ops.fused import triton_twin
from bmburst_ops.host_adamw import Rates, joined, split

_EPS = 1e-6
KERNELS: tuple[str, ...] = get_args(Kernel)
"""Values of `kernel`. "auto": Triton for 16-bit weights on NVIDIA GPUs that support it, else BMTrain's kernel for bf16
and torch for fp16."""


class AdamW(bmt.optim.AdamOptimizer):  # type: ignore[misc]  # BMTrain has no types
    """BMTrain's Adam with decoupled weight decay in every dtype (arXiv:1711.05101, algorithm 2).

    BMTrain's 16-bit kernels decouple weight decay. Its fp32 path adds it to the gradient, and on GPUs fails with the
    step counter that torch 2.11 requires; here fp32 parameters use torch's functional AdamW. 16-bit weights on NVIDIA
    GPUs use a Triton kernel (`bmburst_ops.triton_elementwise`), which computes the same as BMTrain's kernel with fewer
    and wider memory accesses; the state of bf16 weights is the same.

    BMTrain's kernel keeps the first moment of fp16 weights in fp16, multiplied by the loss scale. When the scale grows,
    a moment beyond 65504 becomes infinite and stays so. Here moments are fp32, without the scale, unless `kernel` is
    "bmtrain" and the state is on the GPU.

    Clipping does not take a pass over memory: `step` divides the gradient of 16-bit weights by the loss scale and the
    clipping factor together, in fp32. Gradients of fp32 weights on the GPU are scaled in place, and so are those of
    fp16 weights that BMTrain's kernel updates, because its first moment must carry the loss scale alone.

    With `offload` the state and the fp32 master weights are in host memory, where `bmburst.optim.updates` updates
    them. This frees 12 bytes of GPU memory per 16-bit weight and 8 per fp32 weight. Results may differ in the last
    bits. fp32 weights agree within `4 * 2**-23` of the larger of weight and update, because the fused kernel multiplies
    in another order. Moments agree within one unit in the last place. 16-bit weights are rounded to nearest from their
    master in both cases. `state` and checkpoints have the same content, except for fp16 weights that BMTrain's kernel
    updates.

    Weights of a `bmburst.blocks.streamed.StreamedBlock` need `offload`. A background thread updates them after `step`
    returns (`bmburst.optim.updates`). `bmburst.zero` and the methods of this class wait for it before they read them
    or their state. Each bf16 weight then keeps 2 bytes of its master instead of 4, and a master weight exactly halfway
    between two bf16 numbers may lose its last bit.

    With a `state` of fewer bytes, moments are rounded stochastically (`bmburst_ops.moments`), and the master of a bf16
    weight is its remainder also on the GPU. The kernel is `bmburst_ops.triton_moments` where Triton runs, else torch.

    Args:
        params: As in any torch optimizer; fp32, bf16 or fp16.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay per unit of `lr`.
        offload: Whether the state is in host memory and the host computes the update.
        kernel: Kernel that updates weights on a GPU: one of `KERNELS`.
        state: Type of the moments: one of `bmburst.optim.states.DTYPES`.
        parts: The parameters that each storage holds, for a small state (`bmburst.optim.states.parts_of`). By default
            each storage is one parameter, whose random numbers depend on the rank in its ZeRO group.

    Raises:
        UserError: The kernel or the state is unknown, the kernel has no such state, or weights are in host memory
            without `offload`.
    """

    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        offload: bool = False,
        kernel: str = "auto",
        state: str = "float32",
        parts: Mapping[torch.Tensor, Sequence[Part]] | None = None,
    ) -> None:
        require_known("optimizer kernel", kernel, KERNELS)
        require_known("optimizer state", state, DTYPES)
        if state != "float32":
            require_kernel(kernel, state)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._kernel, self._kind = kernel, state
        self._parts: dict[torch.Tensor, Sequence[Part]] = dict(parts or {})
        self._host = HostAdam() if offload else None
        self._has_scaled_state = kernel == "bmtrain" and not offload  # of fp16 weights
        self._late = LateUpdates()
        self._coming: dict[torch.Tensor, Future[dict[str, Any]]] = {}
        self._factor: float | None = None
        if self._host is None and any(host_shard(each) for each in self._parameters()):
            raise UserError("weights are in host memory, but the optimizer state is not\nfix: AdamW(..., offload=True)")

    def prepare(self, after: Callable[[], None] = lambda: None) -> None:
        """Start to create the state in host memory in a thread. Weights must not change until the first step.

        Otherwise the first step creates it: touching 90 GiB takes 4 seconds on 16 cores, and so does copying weights.

        Args:
            after: Called first in the thread, to wait for allocations that are needed earlier: threads that touch new
                memory at the same time slow each other down.
        """
        missing = [p for p in self._parameters() if p.requires_grad and not self.state.get(p)]
        if self._host is None or not missing:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        device = torch.cuda.current_device()

        def make(parameter: torch.Tensor) -> dict[str, Any]:
            torch.cuda.set_device(device)
            with torch.no_grad(), torch.cuda.stream(side):
                return self._initial_state(parameter)

        thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer-state")
        thread.submit(after)
        self._coming = {parameter: thread.submit(make, parameter) for parameter in missing}
        thread.shutdown(wait=False)

    def state_of(self, shard: NamedShard, name: str) -> torch.Tensor:
        """Return this rank's shard of a parameter's state, flat, fp32; the initial state before the first step.

        Args:
            shard: The parameter.
            name: One of `state_names(shard)`.
        """
        state = self._settled(shard)
        if name == MASTER:
            has_remainder = REMAINDER in state
            return joined(shard.local(), shard.local(state[REMAINDER])) if has_remainder else shard.local(state[name])
        if self._kind == "float32":
            return shard.local(state[name])
        part = self.part_of(shard)
        return shard.local(state[name])[:0].float() if part is None else moment(state, name, part)

    def stored_of(self, shard: NamedShard, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's shard of a moment as it is stored, flat, and the scales of its blocks if it is codes.

        Args:
            shard: The parameter.
            name: "exp_avg" or "exp_avg_sq".
        """
        state = self._settled(shard)
        if (scales := state.get(SCALES[name])) is None:
            return shard.local(state[name]), None
        part = self.part_of(shard)
        return shard.local(state[name]), scales[part.blocks if part else slice(0)]

    def _settled(self, shard: NamedShard) -> dict[str, Any]:
        kept = host_shard(shard.storage)
        if kept is not None:
            kept.settle()
        return self.state.get(shard.storage) or self._initial_state(shard.storage)

    def part_of(self, shard: NamedShard) -> Part | None:
        """Return the part of the storage that is this rank's shard; None if the rank has no element of it.

        Raises:
            ValueError: The optimizer was made without `parts` for a storage of several parameters.
        """
        if not shard.count:
            return None
        for part in self._parts_of(shard.storage):
            if (part.offset, part.count) == (shard.offset, shard.count):
                return part
        raise ValueError(f"{shard.name}: AdamW(..., parts=parts_of(named_shards(model), seed)) knows where it lies")

    @property
    def kind(self) -> str:
        """Type of the moments."""
        return self._kind

    @torch.no_grad()
    def load_state_of(self, shard: NamedShard, name: str, piece: torch.Tensor, step: int) -> None:
        """Set the state that `state_of` returns, and the number of steps.

        Masters of bf16 weights that are kept as remainders set the weights too, because they share their bits. Moments
        are rounded to nearest.

        Args:
            shard: The parameter.
            name: One of `state_names(shard)`.
            piece: This rank's shard of the state, fp32.
            step: Number of steps taken.
        """
        state = self._state(shard.storage)
        state[STEP] = step
        if name == MASTER and REMAINDER in state:
            weights, remainder = shard.local(), shard.local(state[REMAINDER])
            split(piece.to(weights.device), weights, remainder)
            # BMTrain gathers on its own stream, which must not start before the weights are written.
            bmt.config["load_stream"].wait_stream(torch.cuda.current_stream())
        elif name != MASTER and self._kind != "float32":
            if part := self.part_of(shard):
                set_moment(state, name, part, piece)
        else:
            scatter_piece(shard, piece, state[name])

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's ZeRO shards of the gradient; copies of some to host memory may be pending."""
        return [p.grad for p in self._parameters() if p.grad is not None]

    def clip(self, norm: float, most: float | None) -> None:
        """Let the next `step` scale the gradient so that its norm is at most `most`, as torch's `clip_grad_norm_`.

        Args:
            norm: Norm of the whole gradient, over all ranks.
            most: Maximum norm; None: no clipping.
        """
        self._factor = None if most is None or most >= norm + _EPS else most / (norm + _EPS)

    # torch wraps both methods so that torch.compile leaves them out; the first call of a wrapper imports the compiler,
    # which takes 2 s and serves nothing here.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    _zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """See `torch.optim.Optimizer.zero_grad`. Gradients in host memory are always dropped."""
        self._factor = None
        for parameter in self._parameters():
            if host_shard(parameter) is not None:
                parameter.grad = None
        self._zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, scale: float = 1) -> Any:
        """Call `closure`, update this rank's shards with gradients divided by `scale`; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self._factor = self._factor, None
        divisor = scale if factor is None else scale / factor
        groups = self.param_groups
        if self._host is not None:
            self._host.step([update for group in groups for update in self._updates(group)], divisor)
            # Last: the weights above are needed first, and both updates share the host's memory bandwidth.
            self._late.start([each for group in groups for each in self._shard_updates(group, divisor)])
            return loss
        if self._kind != "float32":
            for group in groups:
                self._step_small(group, divisor)
            return loss
        others: dict[float, list[dict[str, Any]]] = {}  # groups that BMTrain's kernel updates, by the divisor
        for group in groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            dtype = group["params"][0].dtype
            is_in_place = dtype == torch.float32 or (dtype == torch.float16 and self._has_scaled_state)
            if factor is not None and is_in_place:
                for parameter in parameters:
                    parameter.grad.mul_(factor)  # _foreach_mul_ rounds the factor to 16 bits on CPUs
            if dtype == torch.float32:
                step_wide(parameters, [self.state[p] for p in parameters], _rates(group), scale)
            elif (fused := self._fused(parameters)) is not None:
                step_fused(fused, self._updates(group), divisor)
            elif self._is_half(group["params"][0]):
                step_plain(self._updates(group), divisor)
            else:
                others.setdefault(scale if is_in_place else divisor, []).append(group)
        try:
            for by, self.param_groups in others.items():
                super().step(scale=by)
        finally:
            self.param_groups = groups
        return loss

    def _step_small(self, group: dict[str, Any], scale: float) -> None:
        updates = list(self._updates(group))
        kernel = triton_twin("triton_moments", *(each.weights for each in updates)) if updates else None
        if kernel is None:
            step_plain(updates, scale)
        else:
            step_small(kernel, updates, scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of an AdamW with the same type of state, with or without offload.

        Raises:
            UserError: Moments do not have the dtype that this optimizer uses.
            ValueError: The parameter groups differ.
        """
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        states = {
            parameter: state_dict["state"][key]
            for key, parameter in zip(saved, self._parameters(), strict=False)
            if key in state_dict["state"]
        }
        for state in states.values():
            found = state[MEAN].dtype
            if found != DTYPES[self._kind] and (found, self._kind) != (torch.float16, "float32"):
                has = next((kind for kind, dtype in DTYPES.items() if dtype == found), str(found))
                raise UserError(
                    f"the saved optimizer state is {has}, but {self._kind} here\n"
                    f"fix: AdamW(..., state={has!r}), or a checkpoint of bmburst train, which is converted"
                )
        wanted = torch.float16 if self._has_scaled_state else DTYPES[self._kind]
        for parameter, state in states.items():
            if parameter.dtype == torch.float16 and state[MEAN].dtype != wanted:
                raise UserError(
                    f"{MEAN} of fp16 weights is {state[MEAN].dtype}, but {wanted} here: BMTrain's kernel keeps it "
                    "times the loss scale\nfix: load it with the kernel and the offload that it was saved with"
                )
        if self._host is None and self._kind == "float32":
            super().load_state_dict(state_dict)
            for parameter, state in states.items():
                if self._is_half(parameter):  # BMTrain has made it fp16
                    self.state[parameter][MEAN] = state[MEAN].to(parameter.device, torch.float32, copy=True)
            return
        super().load_state_dict({**state_dict, "state": {}})  # it would put the state on the GPU, in other dtypes
        for parameter, state in states.items():
            device = parameter.device if self._host is None else torch.device("cpu")
            self.state[parameter] = {
                name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
            if self._kind == "float32":
                self.state[parameter][MEAN] = self.state[parameter][MEAN].float()

    def _on_justify_scale(self, old_scale: float, new_scale: float) -> None:
        if self._has_scaled_state:
            super()._on_justify_scale(old_scale, new_scale)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _updates(self, group: dict[str, Any]) -> Iterator[Update]:
        """Yield the updates of weights that are not in host memory. A GPU begins before the last one is made."""
        rates = _rates(group)
        for p in group["params"]:
            if p.grad is not None and p.requires_grad and host_shard(p) is None:
                yield Update(weights=p.data, **self._given(p, rates))

    def _shard_updates(self, group: dict[str, Any], scale: float) -> list[ShardUpdate]:
        rates = _rates(group)
        return [
            ShardUpdate(weights=shard.weights, **self._given(p, rates), shard=shard, scale=scale)
            for p in group["params"]
            if p.grad is not None and p.requires_grad and (shard := host_shard(p))
        ]

    def _given(self, p: torch.Tensor, rates: Rates) -> dict[str, Any]:
        """Return the fields of a parameter's update other than its weights."""
        return {"gradient": p.grad, "state": self._state(p), "parts": self._parts_of(p), "rates": rates}

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter; create it if it is missing."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            coming = self._coming.pop(parameter, None)
            state.update(coming.result() if coming else self._initial_state(parameter))
        return state

    def _initial_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        parts = self._parts_of(parameter)
        if kept := host_shard(parameter):
            return initial_state(kept.weights, kept.weights.device, self._kind, parts, with_weights=True)
        device = parameter.device if self._host is None else torch.device("cpu")
        state = initial_state(parameter.data, device, self._kind, parts)
        if parameter.dtype == torch.float16 and self._has_scaled_state:
            state[MEAN] = state[MEAN].half()
        return state

    def _parts_of(self, storage: torch.Tensor) -> Sequence[Part]:
        found = self._parts.get(storage)
        if found is None:
            number = next((i for i, each in enumerate(self._parameters()) if each is storage), None)
            if number is None:  # of another stage of a pipeline
                return ()
            # Ranks with copies of each other have the same number in their groups.
            rank = bmt.nccl.commRank(bmt.config["zero_comm"]) if bmt.config["initialized"] else 0
            found = self._parts[storage] = part_of_all(storage.numel(), f"{number} of rank {rank}")
        return found

    def _fused(self, parameters: Sequence[torch.Tensor]) -> Any | None:
        """Return `triton_elementwise` if it can update these parameters, else None."""
        kinds = {p.dtype for p in parameters}
        if self._kernel != "auto" or kinds not in ({torch.bfloat16}, {torch.float16}):
            return None
        return triton_twin("triton_elementwise", *parameters)

    def _is_half(self, weights: torch.Tensor) -> bool:
        """Whether weights are fp16 with moments that do not carry the loss scale."""
        return weights.dtype == torch.float16 and not self._has_scaled_state


def build_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, *, outward_ratio: float = 1.0, seed: int = 0
) -> AdamW:
    """Return AdamW over the model's shards; weight decay is on the kinds of parameters that the configuration names.

    Each parameter group has `lr_factor`, the factor on the learning rate of its step.

    Args:
        model: A model of BMTrain modules. A block keeps parameters apart that are treated differently, see
            `bmburst.blocks.kinds.apart`.
        config: Hyperparameters; the trainer overwrites the learning rate before each step.
        outward_ratio: `lr_factor` of the second matrices of adapters and of vectors (LoRA+, arXiv:2402.12354, as in
            PEFT's `create_loraplus_optimizer`).
        seed: Of the rounding of a small state.

    Raises:
        UserError: Parameters that a block keeps together need different rates.
    """
    found: dict[tuple[float, float], dict[int, torch.Tensor]] = {}
    rates: dict[int, tuple[float, float]] = {}
    shards = [shard for shard in named_shards(model) if shard.storage.requires_grad and shard.is_here]
    for shard in shards:
        kind, of_storage = kind_of(shard.name, shard.shape), id(shard.storage)
        decay = config.weight_decay if kind in config.weight_decay_on else 0.0
        has_ratio = shard.name.endswith(OUTWARD) or kind not in MATRICES
        wanted = decay, outward_ratio if has_ratio else 1.0
        if rates.setdefault(of_storage, wanted) != wanted:
            raise UserError(
                f"{shard.name} is kept in one tensor with parameters of another weight decay or learning rate\n"
                f"fix: give it a BMTrain group of its own, or build the model with kept_apart={sorted(KINDS)}"
            )
        found.setdefault(wanted, {})[of_storage] = shard.storage
    groups = [
        {"params": list(found[rates].values()), "weight_decay": rates[0], "lr_factor": rates[1]}
        for rates in sorted(found, reverse=True)
    ]
    return AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        offload=config.offload,
        kernel=config.kernel,
        state=config.state,
        parts=None if config.state == "float32" else parts_of(shards, seed),
    )


def state_names(shard: NamedShard) -> tuple[str, ...]:
    """Return the names of AdamW's state tensors of a parameter; `AdamW.state_of` returns each in fp32."""
    return _names(shard.dtype)


def _rates(group: dict[str, Any]) -> Rates:
    return Rates(*(group[name] for name in Rates._fields))


def _names(dtype: torch.dtype) -> tuple[str, ...]:
    return (MEAN, SQUARE) if dtype == torch.float32 else (MEAN, SQUARE, MASTER)
