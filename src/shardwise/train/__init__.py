"""The trainer behind ``shardwise train`` and ``sw.Run``: a user of ``shardwise.api``, one package for each part.

In the order of a run:

``spec``         what a user's code replaces: ``sw.TrainSpec``, ``sw.Mean``; ``callback``: ``sw.Callback``
``call``         ``sw.train``, from Python
``start``        the launcher's side: from a verb's arguments to checked settings and processes
``config/``      ``sections``: the fields of a configuration; ``document``: YAML and JSON; ``resolve``: checks across
                 sections, against world, model and data; ``hf``: what a Hugging Face folder says of its model
``rank``         every rank's side, a session: join the world, agree on the run's folder, lock it, be watched
``folder``       a run's folder and its files; ``lock``: one run at a time; ``new_world``: a run that is started again
``control``      what ranks exchange beside training
``model/``       ``build``: model, objective and optimizer; ``pretrained``: Hugging Face weights; ``lora``: adapters
``data/``        from files to the samples of each rank's step, ``given``: a user's own; ``microbatches`` reads them
``loop``         what is around the steps, whoever makes them
``trainer``      the trainer's steps; ``evaluation``: the held-out loss and metrics. ``run``: ``sw.Run``, around others
``steps/``       ``update``: clip and step; ``unread``: values that steps leave on the device; ``health``: losses that
                 are not finite or stand out; ``pace``: time limits; ``trace``: a profile
``saves/``       ``checkpoints``: which one to continue from, writing and keeping them; ``uploads``: copies on
                 a store; ``saved_state``: what they hold beside tensors, checked; ``random_state``: generators as data
``predicted/``   ``budget``: whether a run fits, before processes start; ``memory`` and ``step``: bytes and time of a
                 step, beside what is measured
``log/``         ``recorder``: numbers of steps; ``progress``: the terminal; ``report``: other files
``proof``        strategies against one process on a run's own model and data
``trained``      what has been trained and can be asked: a run, a checkpoint, or a Hugging Face folder; ``export``: as a
                 Hugging Face folder
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """The package, which can be called: ``sw.train`` is ``shardwise.train.call.train``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # whose signature and words help() and inspect show
        from shardwise.train.call import train

        return train


sys.modules[__name__].__class__ = _Package
