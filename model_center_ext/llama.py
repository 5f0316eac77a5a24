"""ModelCenter's Llama over a split sequence: bmburst's LLaMA with ModelCenter's parameter names and call signature."""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.amounts import short_text, whole_number
from bmburst.attention.module import BurstAttention
from bmburst.attention.options import MaskOption, require_tensor
from bmburst.blocks.model import Llama as Blocks
from bmburst.checkpoint.hugging_face import Weights, open_weights
from bmburst.checkpoint.model_center import ATTENTION_PLACES, BLOCK_PLACES, MLP_PLACES, model_center_name
from bmburst.checkpoint.sharded_files import on_every_rank
from bmburst.comm.checks import contents, describe_tensors
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError
from bmburst.mesh import Mesh, current_mesh, require_no_stages
from bmburst.schedule.mask import Causal, Intersection, Mask, make_mask
from bmburst.schedule.tree import Tree
from bmburst.sequence import SequenceShard
from bmburst.zero import named_shards, scatter_piece
from model_center_ext.config import LlamaConfig

Directory = str | os.PathLike[str]


class LlamaOutput(NamedTuple):
    """Output of `Llama` with the names of ModelCenter's BaseModelOutput; fields that it never has are None.

    Attributes:
        last_hidden_state: `[batch, local_tokens, dim_model]`, after the last norm; for MiniCPM multiplied by its factor
            on the logits.
        past_key_values: None.
        logits: `[batch, local_tokens, vocab_size]`, or None.
        hidden_states: None.
        attentions: None.
    """

    last_hidden_state: Tensor
    past_key_values: None = None
    logits: Tensor | None = None
    hidden_states: None = None
    attentions: None = None


class Llama(Blocks):
    """ModelCenter's Llama with sequences split over ranks. Weights are undefined until initialised or loaded.

    Parameters have ModelCenter's names, so that `bmtrain.save`, `bmtrain.load(..., strict=False)` and
    `bmtrain.init_parameters` work as with ModelCenter's class. `loss` returns the sum of the token losses without the
    tensor of all logits, as that of `bmburst.blocks.model.Llama`.

    Args:
        config: Model and runtime fields.
        mesh: The mesh whose sequence groups share sequences. Default: the current mesh, else every rank has its own
            sequences, as with ModelCenter's class.

    Raises:
        UserError: An option is unknown, or the ranks of a tensor group cannot split the model.
    """

    def __init__(self, config: LlamaConfig, mesh: Mesh | None = None) -> None:
        mesh = current_mesh() if mesh is None else mesh
        if mesh is not None:
            require_no_stages(mesh, "ModelCenter's")
        sequence = single_rank_group(communicator(None)) if mesh is None else mesh.sequence
        # A single rank has all tokens in order, so the layout does not matter and needs no padding.
        layout = config.layout if sequence.size > 1 else "contiguous"
        super().__init__(
            config.shape(),
            attention=partial(BurstAttention, group=sequence, layout=layout, **config.attention_options()),
            dtype=getattr(torch, config.dtype_name),
            recompute=config.recompute,
            zero_level=config.zero_level,
            seed=None,
            loss_chunk=config.loss_chunk,
            norm_kernel=config.norm_kernel,
        )
        self.model_center_config, self._sequence, self._layout = config, sequence, layout
        _rename_parameters(self)
        _set_initializers(self, _initializers(config))

    @classmethod
    def from_pretrained(
        cls, directory: Directory, config: LlamaConfig | None = None, *, mesh: Mesh | None = None, **changes: Any
    ) -> "Llama":
        """Return the model of a directory of ModelCenter (pytorch_model.pt) or Hugging Face (safetensors) weights.

        Every rank calls it and reads only its own part. Nothing is downloaded.

        Args:
            directory: The directory with config.json and the weights.
            config: Replaces the directory's configuration; the model must have the same shape.
            mesh: See `Llama`.
            changes: Changed fields of the directory's configuration, for example `dtype="bfloat16"`.

        Raises:
            UserError: On all ranks, if the directory has no complete LLaMA, or one of another shape.
        """
        model = cls(config or LlamaConfig.from_pretrained(directory, **changes), mesh)
        model.load_pretrained(directory)
        return model

    @classmethod
    def from_json_file(cls, json_file: Directory, *, mesh: Mesh | None = None, **changes: Any) -> "Llama":
        """Return a model with new weights from a config.json with some fields changed; as ModelCenter's method.

        Raises:
            UserError: The file or a value is wrong.
        """
        model = cls(LlamaConfig.from_json_file(json_file, **changes), mesh)
        bmt.init_parameters(model)
        return model

    def load_pretrained(self, directory: Directory) -> None:
        """Load the weights of a directory, converted to the model's dtype; see `from_pretrained`.

        Raises:
            UserError: On all ranks, if the directory has no complete LLaMA, or one of another shape.
        """
        opened: list[Weights] = []
        on_every_rank(lambda: opened.append(open_weights(Path(directory))))
        (weights,) = opened
        known = {model_center_name(name): name for name in weights.places}
        shards = named_shards(self)

        def compare() -> None:
            there = {name: weights.places[first][0].shapes[weights.places[first][1]] for name, first in known.items()}
            here = {shard.name: shard.shape for shard in shards}
            for name in (*here, *there):
                ours, theirs = here.get(name), there.get(name)
                if ours != theirs:
                    raise UserError(
                        f"{name} has shape {ours} in this model, but {theirs} in {directory}\n"
                        "fix: leave config out, to use the directory's own"
                    )

        on_every_rank(compare)
        for shard in shards:
            if shard.count:
                scatter_piece(shard, shard.read(partial(weights.read, known[shard.name])))

    def forward(  # type: ignore[override]  # ModelCenter's
        self,
        input_ids: Tensor | None = None,
        length: int | Tensor | None = None,
        attention_mask: None = None,
        inputs_embeds: None = None,
        use_cache: bool = False,
        past_key_values: None = None,
        output_logits: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,  # noqa: ARG002
        *,
        positions: Tensor | None = None,
        mask: MaskOption | None = None,
    ) -> LlamaOutput:
        """Return hidden states and logits of this rank's tokens; attention is causal by default.

        Arguments have ModelCenter's order. After `length` only `output_logits`, `positions` and `mask` may be set:
        there is no KV cache, and only the last hidden states are kept. `return_dict` is ignored: the output is a named
        tuple in ModelCenter's order.

        Args:
            input_ids: `[batch, local_tokens]` int64: this rank's part of the batch, made by `bmburst.SequenceShard` or
                `bmburst.shard` in the configuration's layout.
            length: Real tokens of the whole sequence over all ranks; later tokens are padding. A split sequence needs
                `length` or `positions`. Or, as in ModelCenter, `[batch]`: real tokens of each sample. The padding after
                them gets undefined outputs, which real tokens never see, and needs labels of `IGNORE_INDEX`.
            attention_mask: None; `length` and `mask` replace it.
            inputs_embeds: None.
            use_cache: False.
            past_key_values: None.
            output_logits: Whether to compute logits.
            output_attentions: False.
            output_hidden_states: False.
            return_dict: Ignored.
            positions: `[batch, local_tokens]` int64: position of each token in the whole sequence or in its document.
                Default: the positions of this rank in the layout.
            mask: As in `bmburst.burst_attention`.

        Raises:
            UserError: An unsupported argument is set, ids, positions and length do not fit, or the ranks hold no parts
                of one split batch.
        """
        generate = "generate with bmburst generate or Hugging Face, after bmburst convert"
        leave_out = "leave it out; length and mask define visible tokens"
        refused = {
            "use_cache": (use_cache, generate),
            "past_key_values": (past_key_values is not None, generate),
            "attention_mask": (attention_mask is not None, leave_out),
            "inputs_embeds": (inputs_embeds is not None, leave_out),
            "output_attentions": (output_attentions, leave_out),
            "output_hidden_states": (output_hidden_states, leave_out),
        }
        for name, (is_set, fix) in refused.items():
            if is_set:
                raise UserError(f"{name} is not supported\nfix: {fix}")
        if input_ids is None:
            raise UserError("input_ids are missing\nfix: pass input_ids, int64 of shape [batch, local_tokens]")
        positions, whole = self._placed(input_ids, positions, length, mask)
        embedding = self.model.embed_tokens.weight
        local = self._hidden(input_ids, positions, whole, embedding, mask)
        hidden = self.tensor.gather(local, input_ids.shape[1])
        logits = torch.nn.functional.linear(hidden, self._head(embedding)) if output_logits else None
        return LlamaOutput(last_hidden_state=hidden, logits=logits)

    def loss(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor,
        length: int | Tensor | None = None,
        mask: MaskOption | None = None,
        *,
        per_token: bool = False,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of this rank's token losses; see `bmburst.blocks.model.Llama.loss`; `length` as in `forward`.

        Raises:
            UserError: As there, or the ranks do not hold parts of one split batch.
        """
        placed, whole = self._placed(tokens, positions, length, mask, labels)
        return super().loss(tokens, placed, labels, whole, mask, per_token=per_token, keys=keys)

    def _placed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        length: int | Tensor | None,
        mask: MaskOption | None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, int | None]:
        """Check that the ranks of a sequence hold parts of one batch; return the positions and the sequence's length.

        Shapes cannot tell parts from whole batches, which a script without `shard` would pass on each rank. So a split
        sequence needs its length or positions.
        """

        def decide() -> tuple[tuple[Tensor, int | None], str]:
            _require_ids(ids, labels)
            if isinstance(length, Tensor):
                _require_lengths(length, ids, self._sequence.size, mask)
            whole = None if length is None or isinstance(length, Tensor) else whole_number("length", length, 1)
            if self._sequence.size > 1:
                self._require_parts(ids, positions, length)
            told = contents(length) if isinstance(length, Tensor) else whole
            facts = f"ModelCenter's Llama\ninput_ids {describe_tensors(ids)}\nlength {told}"
            facts += f"\npositions {'given' if positions is not None else None}"
            return (self._positions(ids, whole) if positions is None else positions, whole), facts

        with self._sequence.first_calls("ModelCenter's Llama"):
            return self._sequence.decided(decide)

    def _require_parts(self, ids: Tensor, positions: Tensor | None, length: int | Tensor | None) -> None:
        size, local = self._sequence.size, ids.shape[-1]
        problem = None
        if length is None and positions is None:
            problem = "but neither length nor positions"
        elif isinstance(length, Tensor) and length.numel() and int(length.max()) <= local:
            problem = f"and lengths of at most {int(length.max())}, as of whole sequences"
        if problem is not None:
            raise UserError(
                f"{size} ranks share a sequence, and this one was given input_ids {list(ids.shape)}, {problem}\n"
                "fix: split each batch with bmburst.SequenceShard.cut(...).batch(...), and pass length, of the whole "
                "sequence\nor, if every rank has its own sequences: Llama(config) without a mesh"
            )

    def _positions(self, ids: Tensor, length: int | None) -> Tensor:
        size, local = self._sequence.size, ids.shape[-1]
        if self._layout == "balanced":
            raise UserError(
                "layout balanced needs positions, since it depends on the mask\n"
                "fix: pass positions of bmburst.SequenceShard.batch"
            )
        whole = local * size if length is None else length
        cut = SequenceShard.cut(whole, layout=self._layout, size=size, rank=self._sequence.rank)
        is_alone = size == 1 and whole <= local  # not split: any amount of padding is allowed
        if ids.dim() != 2 or not (is_alone or cut.local_tokens == local):
            raise UserError(
                f"input_ids {list(ids.shape)} are not a part of {whole} tokens over {size} ranks in layout "
                f"{self._layout}\nallowed: [batch, {cut.local_tokens}]\n"
                "fix: bmburst.SequenceShard.cut(...).batch(...), and pass length"
            )
        positions = torch.arange(local, device=ids.device) if is_alone else cut.positions(ids.device)
        return positions.expand_as(ids)


def _require_ids(ids: Tensor, labels: Tensor | None) -> None:
    """Raise UserError unless token ids, and labels if given, are whole numbers `[batch, local_tokens]`."""
    for name, tensor in (("input_ids", ids), *([] if labels is None else [("labels", labels)])):
        require_tensor(name, tensor, "[batch, local_tokens]")
        if tensor.dtype not in (torch.int32, torch.int64) or not tensor.numel() or tensor.shape != ids.shape:
            wanted = "[batch, local_tokens]" if tensor is ids else f"{list(ids.shape)}, as of the tokens"
            raise UserError(
                f"{name} must be int32 or int64 {wanted}, got {describe_tensors(tensor)}\n"
                "fix: pass a part of bmburst.SequenceShard.batch"
            )


def _require_lengths(length: Tensor, ids: Tensor, size: int, mask: MaskOption | None) -> None:
    """Raise UserError unless `length` has the real tokens of each sample, and no real token sees padding."""
    tokens = size * ids.shape[-1]
    is_count = length.dtype in (torch.int32, torch.int64) and length.shape == ids.shape[:1]
    if not is_count or not bool(((length >= 0) & (length <= tokens)).all()):
        raise UserError(
            f"length must be a number, or a tensor {list(ids.shape[:1])} for input_ids {list(ids.shape)}, got "
            f"{describe_tensors(length)}: {short_text(length.tolist())}\nallowed: int64, 0 to {tokens} tokens\n"
            "fix: the real tokens of each sample, such as mask.sum(1): they are the first ones, and padding follows"
        )
    if mask is not None and any(map(_sees_later_tokens, mask if isinstance(mask, tuple) else (mask,))):
        raise UserError(
            f"length is {short_text(length.tolist())} and mask {mask}, under which tokens see the padding after them\n"
            "allowed: a length for each sample under causal masks\n"
            "fix: positions, without length, and mask=tuple(bmburst.Documents((n,), causal=False) for n in length)"
        )


def _sees_later_tokens(mask: Mask | str) -> bool:
    made = make_mask(mask)
    parts = made.masks if isinstance(made, Intersection) else (made,)
    return not any(isinstance(part, Causal | Tree) or getattr(part, "causal", False) for part in parts)


def _initializers(config: LlamaConfig) -> Mapping[str, bmt.ParameterInitializer]:
    def normal(mean: float, std: float) -> bmt.ParameterInitializer:
        return bmt.ParameterInitializer(torch.nn.init.normal_, mean=mean, std=std)

    return {
        "layernorm": bmt.ParameterInitializer(torch.nn.init.constant_, val=config.norm_init_var),
        "input_embedding": normal(config.emb_init_mean, config.emb_init_std),
        "self_attention": normal(config.att_init_mean, config.att_init_std),
        "ffn": normal(config.ffn_init_mean, config.ffn_init_std),
        "output_projection": normal(config.proj_init_mean, config.proj_init_std),
    }


def _move(module: torch.nn.Module, places: Mapping[str, str], into: torch.nn.Module | None = None) -> None:
    """Register children of a module under new dotted names.

    The module's code still reaches them under their old names, as plain attributes.

    Args:
        module: The module with the children.
        places: New dotted names by old name; names that the module lacks are skipped.
        into: The root of the new names; default: the module itself.
    """
    root = module if into is None else into
    taken = {name: module._modules.pop(name) for name in places if name in module._modules}
    for name, child in taken.items():
        assert child is not None
        module.__dict__[name] = child
        *parents, last = places[name].split(".")
        at = root
        for parent in parents:
            if parent not in at._modules:
                at.add_module(parent, torch.nn.Module())
            at = at.get_submodule(parent)
        at.add_module(last, child)


def _rename_parameters(model: torch.nn.Module) -> None:
    """Rename the parameters of a `bmburst.blocks.model.Llama` to those of ModelCenter's Llama."""
    inner = model.get_submodule("model")
    for block in inner.get_submodule("layers"):  # type: ignore[attr-defined]  # a list of BMTrain's
        layer = block._module
        _move(layer.self_attn, ATTENTION_PLACES)
        _move(layer.mlp, MLP_PLACES)
        _move(layer, BLOCK_PLACES)
        now = {id(parameter): name for name, parameter in layer.named_parameters()}
        for info in block._param_info:  # BMTrain saves and loads by these names
            info["name"] = now[id(info["parameter"])]
    places = {"embed_tokens": "input_embedding", "layers": "encoder.layers", "norm": "encoder.output_layernorm"}
    _move(inner, places, into=model)
    model.__dict__["model"] = model._modules.pop("model")
    _move(model, {"lm_head": "output_projection"})


def _set_initializers(model: torch.nn.Module, methods: Mapping[str, bmt.ParameterInitializer]) -> None:
    """Set the initializers that `bmtrain.init_parameters` uses.

    Args:
        model: The model.
        methods: Initializers by substring of the parameter name; the first match is used.
    """
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters:
        parameter._init_method = next(method for part, method in methods.items() if part in name)
