"""Learning rate as a pure function of the step: linear warm-up, then cosine, WSD or constant."""

import math

from bmburst.train.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate of one optimizer step.

    Warm-up rises linearly and reaches `peak` at step `warmup_steps`, so the first step already moves. Then

    - "cosine" falls along half a cosine (arXiv:1608.03983) and reaches `final_lr_fraction * peak` at the last step;
    - "wsd" stays at the peak, and over the last `decay_fraction` of all steps falls linearly to the same end
      (warm-up, stable, decay: arXiv:2404.06395);
    - "constant" stays at the peak.

    A run that is resumed with another total follows the schedule of the new total from there on.

    Steps beyond the last have the last step's rate. A warm-up longer than the run just rises to its end.

    Args:
        config: The schedule.
        peak: Highest learning rate.
        step: Number of the step, counted from 1.
        total_steps: Steps of the whole run.

    Raises:
        ValueError: `step` or `total_steps` is below 1.
    """
    if step < 1 or total_steps < 1:
        raise ValueError(f"steps count from 1: got step {step} of {total_steps}")
    step = min(step, total_steps)
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.kind == "constant":
        return peak
    decay_start = config.warmup_steps
    if config.kind == "wsd":
        decay_start = max(decay_start, total_steps - round(config.decay_fraction * total_steps))
    if step <= decay_start:
        return peak
    progress = (step - decay_start) / (total_steps - decay_start)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.kind == "cosine" else 1 - progress
    return peak * (config.final_lr_fraction + (1 - config.final_lr_fraction) * remaining)
