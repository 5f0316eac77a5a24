"""Python's garbage is collected at the same steps on all ranks, and as before after the run."""

import contextlib
import gc
import io
import math
import weakref
from unittest.mock import patch

import pytest

from bmburst.errors import RunError
from bmburst.train import garbage
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train import run_program as program


@on_program(2, fresh=True)  # ranks that ran other tests keep what they had then frozen
def test_garbage_is_collected_at_the_same_steps(tmp_path):
    gc.unfreeze()  # what the server of ranks froze
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(ours.steps_done) if phase == "start" else None)
    for name, is_bad in (("good", False), ("bad", True)):
        ours = program.trainer(tmp_path, name, steps=6, checkpoint_every=None, eval_every=0, max_skipped_steps=2)
        loss, states = ours.model.loss, []

        def seen(*args, loss=loss, states=states, is_bad=is_bad, **options):
            states.append((gc.isenabled(), gc.get_freeze_count() > 1000))
            return loss(*args, **options) * (math.nan if is_bad else 1.0)

        ours.model.loss = seen
        collections.clear()
        ends = refused("2 steps", error=RunError) if is_bad else contextlib.nullcontext()
        with patch.object(garbage, "EVERY", 3), contextlib.redirect_stderr(io.StringIO()), ends:
            ours.train()
        assert set(states) == {(False, True)}
        assert [step for step in collections if 0 < step < ours.steps_done] == ([] if is_bad else [3])
        assert gc.isenabled() and not gc.get_freeze_count()


def test_what_the_caller_disabled_stays_so_and_a_model_is_freed_where_the_caller_froze():
    """In Python 3.12 some hundred objects are frozen from the start."""

    class Model:
        """A model in a cycle."""

    gc.freeze()
    gc.disable()
    try:
        model = Model()
        model.layer, freed = model, weakref.ref(model)
        with pytest.raises(ZeroDivisionError), garbage.held_back():
            raise ZeroDivisionError
        assert not gc.isenabled()
        del model
        gc.collect()
        assert freed() is None
    finally:
        gc.enable()
        gc.unfreeze()
