"""What a training run in a pipeline can do: checks of the configuration. Imports no torch."""

from typing import TYPE_CHECKING

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
    is_other = {
        f"dpo.beta {config.dpo.beta}, whose reference needs the whole model": config.dpo.is_on,
        f"parallel.zero_group {config.parallel.zero_group}: ZeRO shards over the ranks of a stage": (
            config.parallel.zero_group not in ("world", "auto")
        ),
        "optimizer.offload_weights, which streams the blocks of a whole model": config.optimizer.offload_weights,
        f"sample_tokens {config.sample_tokens}: a stage cannot generate text": bool(config.sample_tokens),
        "context_report true: a stage cannot generate the answers of pass keys": bool(config.context_report),
    }
    for what, is_given in is_other.items():
        if is_given:
            raise UserError(
                f"pipeline_parallel {stages} with {what}\nallowed: pipeline_parallel 1\n"
                f"fix: leave {what.split()[0].rstrip(',:')} out, or leave --pipeline-parallel out"
            )
