"""The tables of settings in other programs' files: what is read, what is refused and what has no effect, and why.

A table is one line in `TABLES`: a title, the mapping by which the code accepts keys (name to what is done), and a
function that returns the names that the installed library has. A name of the library that is not in the mapping is
shown as "unknown: refused".
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from bmburst.blocks.families import FAMILIES
from bmburst.blocks.family_keys import COMMON, NOTES, ROTARY
from bmburst.blocks.seq2seq_config import KEYS as BART
from bmburst.checkpoint.adapter import KEYS as ADAPTER
from bmburst.data.messages import MESSAGE_KEYS
from bmburst.data.records import RECORD_KEYS, UNSUPPORTED
from bmburst.inference.generation_fields import GENERATOR, SPLIT_ARGUMENTS, SPLIT_GENERATE
from bmburst.integrations.grpo_arguments import ARGUMENTS as GRPO
from bmburst.integrations.trainer_arguments import ARGUMENTS as TRAINER
from bmburst.integrations.transformers_batch import BATCH_KEYS
from bmburst.serve.protocol import FIELDS as REQUEST

FOREIGN = "<!-- foreign settings -->"
UNKNOWN = "unknown: refused"


@dataclass(frozen=True, slots=True)
class Table:
    """What is done with the keys of one kind of file.

    Attributes:
        title: Heading of the table.
        done: For each key that is understood, what is done with it; shown as `str`.
        fields: Returns the keys that the installed library has.
    """

    title: str
    done: Mapping[str, object]
    fields: Callable[[], Iterable[str]] = tuple

    def rows(self) -> dict[str, list[str]]:
        """Return the keys by what is done with them, in the order of `done`; the unknown ones last."""
        found: dict[str, list[str]] = {}
        for name, does in self.done.items():
            found.setdefault(str(does), []).append(name)
        if unknown := sorted({*self.fields()} - {*self.done}):
            found[UNKNOWN] = unknown
        return found


def model_fields(model_type: str, elsewhere: Iterable[str]) -> set[str]:
    """Return the keys of config.json that transformers has for a type of model, without those of another table."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:  # MiniCPM's code is published with its weights
        return set()
    config = CONFIG_MAPPING[model_type]
    return ({each.name for each in dataclasses.fields(config)} | {*config().to_dict()}) - {*elsewhere}


def common_fields() -> set[str]:
    """Return the keys of config.json that every model of transformers has, and those that transformers 4 put there."""
    from transformers import GenerationConfig, PretrainedConfig

    return {each.name for each in dataclasses.fields(PretrainedConfig)} | {
        *GenerationConfig._get_default_generation_params()
    }


def rotary_fields() -> set[str]:
    """Return the keys of rotary settings in transformers."""
    from transformers.modeling_rope_utils import RopeParameters

    return {*RopeParameters.__annotations__}


def adapter_fields() -> set[str]:
    """Return the keys of PEFT's LoraConfig."""
    from peft import LoraConfig

    return {each.name for each in dataclasses.fields(LoraConfig)}


def generation_fields() -> set[str]:
    """Return the fields of transformers' GenerationConfig."""
    from transformers import GenerationConfig

    return {*GenerationConfig().to_dict()}


def generate_arguments() -> set[str]:
    """Return the arguments of transformers' `generate` that are no field of its GenerationConfig."""
    from transformers import GenerationMixin

    return {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}


def batch_keys() -> set[str]:
    """Return the keys of the batches that collators of transformers and TRL make for causal LMs."""
    from transformers import DataCollatorWithFlattening
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    samples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "completion_mask": [0, 1, 1]} for _ in range(2)]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    collators = [packed, *(DataCollatorForLanguageModeling(0, padding_free=free) for free in (False, True))]
    plain = [{name: values for name, values in sample.items() if name != "completion_mask"} for sample in samples]
    return {key for collate in collators for key in collate(plain if collate is packed else samples)}


def request_fields() -> set[str]:
    """Return the fields of a request of OpenAI's chat completions."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    return {*CompletionCreateParamsBase.__annotations__, "stream"}


def trainer_arguments() -> set[str]:
    """Return the arguments of transformers' Trainer and TRL's SFTTrainer, and the fields of their configurations."""
    from transformers import Trainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    parameters = {*inspect.signature(Trainer).parameters, *inspect.signature(SFTTrainer).parameters}
    return parameters | {each.name for each in dataclasses.fields(SFTConfig)}


def grpo_arguments() -> set[str]:
    """Return the arguments of TRL's GRPOTrainer and RLOOTrainer, and the fields of their configurations."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    parameters = {name for kind in (GRPOTrainer, RLOOTrainer) for name in inspect.signature(kind).parameters}
    return parameters | {each.name for kind in (GRPOConfig, RLOOConfig) for each in dataclasses.fields(kind)}


def said(verb: str, done: Mapping[str, str]) -> dict[str, str]:
    """Return what is done with keys, beginning with a verb unless it has no effect."""
    return {name: does if does.startswith("no effect") else f"{verb}: {does}" for name, does in done.items()}


TABLES = (
    Table("config.json of every family", COMMON, common_fields),
    *(
        Table(f"config.json of {name}", each.keys, partial(model_fields, name, COMMON))
        for name, each in FAMILIES.items()
    ),
    Table(
        "config.json of BART",
        {key: BART[key] for key in BART if key not in NOTES},
        partial(model_fields, "bart", NOTES),
    ),
    Table("rope_scaling and rope_parameters", ROTARY, rotary_fields),
    Table("adapter_config.json", ADAPTER, adapter_fields),
    Table("generation_config.json", GENERATOR, generation_fields),
    Table("GenerationConfig of generate with a split cache", SPLIT_GENERATE, generation_fields),
    Table("Other arguments of generate with a split cache", SPLIT_ARGUMENTS, generate_arguments),
    Table("Batches of transformers", BATCH_KEYS, batch_keys),
    Table("Arguments of Trainer, SFTTrainer and their configurations", TRAINER, trainer_arguments),
    Table("Arguments of GRPOTrainer, RLOOTrainer and their configurations", GRPO, grpo_arguments),
    Table("Records", {**said("read", RECORD_KEYS), **said("refused", UNSUPPORTED)}),
    Table("Messages", said("read", MESSAGE_KEYS)),
    Table("Requests of chat completions", REQUEST, request_fields),
)


def tables() -> str:
    """Return Markdown: a heading and a table for each of `TABLES`."""
    return "\n".join(
        f"### {table.title}\n\n| keys | what is done |\n| --- | --- |\n"
        + "".join(f"| {', '.join(f'`{name}`' for name in names)} | {does} |\n" for does, names in table.rows().items())
        for table in TABLES
    )
