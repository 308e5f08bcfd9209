"""The trainer behind ``shardwise train``: a user of ``shardwise.api``, one package for each part that can be replaced.

In the order of a run:

``start``        the launcher's side: from a verb's arguments to checked settings and processes
``config/``      ``sections``: the fields of a configuration; ``document``: YAML and JSON; ``resolve``: checks across
                 sections, against world, model and data; ``hf``: what a Hugging Face folder says of its model
``rank``         every rank's side: join the world, agree on the run's folder, lock it, train
``folder``       a run's folder and its files; ``lock``: one run at a time; ``new_world``: a run that is started again
``control``      what ranks exchange beside training
``model/``       ``build``: model, objective and optimizer; ``pretrained``: Hugging Face weights; ``lora``: adapters
``data/``        from files to the samples of each rank's step; ``microbatches`` reads them as tensors
``loop``         the steps; ``evaluation``: the held-out loss
``steps/``       ``update``: clip and step; ``unread``: values that steps leave on the device; ``health``: losses that
                 are not finite or stand out; ``slow``: a slow rank; ``pace``: time limits; ``mfu``: FLOP/s
``saves/``       ``checkpoints``: which one to continue from, writing and keeping them; ``memory_tier``: those in
                 memory; ``saved_state``: what they hold beside tensors, checked; ``random_state``: generators as data
``predicted/``   ``budget``: whether a run fits, before processes start; ``memory`` and ``time``: of a step, beside what
                 is measured
``log/``         ``metrics``, ``recorder``: numbers of steps; ``progress``: the terminal; ``report``: other files
``proof``        strategies against one process on a run's own model and data
``trained``      what has been trained and can be asked: a run, a checkpoint, or a Hugging Face folder; ``export``: as a
                 Hugging Face folder
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """The package, which can be called: ``sw.train(...)`` is ``shardwise.train.call.train``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from shardwise.train.call import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
