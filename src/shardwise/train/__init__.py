"""The trainer behind ``shardwise train`` and ``sw.Run``. It uses only ``shardwise.api``, and has a package per part.

In the order of a run:

``spec``         the parts that a user's code may replace: ``sw.TrainSpec``, ``sw.Mean``; ``callback``: ``sw.Callback``
``call``         ``sw.train``, called from Python
``launcher``     the launcher's side: from a verb's arguments to checked settings and processes
``config/``      ``sections``: the fields of a configuration; ``document``: YAML and JSON; ``resolve``: checks across
    sections, against world, model and data; ``hf``: facts from the configuration of a Hugging Face folder
``worker``       every rank's side, a session: join the world, agree on the run's folder, lock it, start the watchdog
``folder``       a run's folder and its files; ``lock``: one process group per run; ``elastic``: restarted runs
``control``      communication between ranks outside of training steps
``model/``       ``build``: model, objective and optimizer; ``pretrained``: Hugging Face weights; ``lora``: adapters
``data/``        from files to the samples of a rank's step; ``user_data``: a spec's data; ``microbatches`` reads them
``loop``         everything around the steps, for the trainer and for ``sw.Run``
``trainer``      the trainer's steps; ``evaluation``: the held-out loss and metrics. ``run``: ``sw.Run``, for user loops
``steps/``       ``update``: clip and step; ``pending_metrics``: values that steps leave on the device; ``health``:
    losses that are not finite or are outliers; ``timeouts``: time limits; ``trace``: a profile
``checkpoints/`` ``checkpoints``: choosing one to continue from, writing and keeping them; ``uploads``: copies on
    a store; ``saved_state``: their content other than tensors, checked; ``random_state``: generators as data
``predicted/``   ``budget``: whether a run fits, before processes start; ``memory`` and ``step``: bytes and time of a
    step, compared with measurements
``log/``         ``recorder``: numbers of steps; ``progress``: the terminal; ``report``: other files
``parity``       comparison of strategies with one process on a run's model and data
``load``         models to generate from and evaluate: a run, a checkpoint, or a Hugging Face folder; ``export``: to a
    Hugging Face folder
"""

from __future__ import annotations

import sys

from shardwise.launch import CallablePackage


class _Package(CallablePackage):
    """The package as a callable: ``sw.train(...)`` calls ``train`` of ``shardwise.train.call``."""

    _CALLED_IN = "call"


sys.modules[__name__].__class__ = _Package
