"""What a training run in a pipeline can do: checks of the configuration. Imports no torch."""

from typing import TYPE_CHECKING

from bmburst.config import option_name
from bmburst.errors import UserError
from bmburst.recompute.policy import AUTO, Policy
from bmburst.schedule.pipeline import require_stages

if TYPE_CHECKING:
    from bmburst.train.config import TrainConfig


def require_pipeline(config: "TrainConfig") -> None:
    """Check that a run can be divided into its stages; nothing for a run without a pipeline.

    Raises:
        UserError: There are more stages than layers, or the run does something that stages cannot.
    """
    stages = config.parallel.pipeline_parallel
    if stages == 1:
        return
    require_stages(stages, config.model.num_layers)
    config.lora.require_stages(stages, config.parallel.zero_level)
    if config.recompute != AUTO:
        Policy.parse(config.recompute).require_stages(stages)
    zero, sampled = config.parallel.zero_group, config.sample_tokens
    others = (
        (config.dpo.is_on, "dpo.beta", config.dpo.beta, "none", "the reference needs the whole model"),
        (zero not in ("world", "auto"), "parallel.zero_group", zero, "world", "ZeRO shards over the ranks of a stage"),
        (config.optimizer.offload_weights, "optimizer.offload_weights", "true", "false", "it streams all blocks"),
        (sampled, "sample_tokens", sampled, "0", "a stage cannot generate text"),
        (config.context_report, "context_report", "true", "false", "a stage cannot answer questions"),
    )
    for is_given, name, value, allowed, why in others:
        if is_given:  # by an option, or by the file of a resumed run
            raise UserError(
                f"pipeline_parallel {stages} with {name} {value}: {why}\n"
                f"allowed: {name} {allowed}, or pipeline_parallel 1\n"
                f"fix: {option_name(name, {})} {allowed}, or --pipeline-parallel 1"
            )
