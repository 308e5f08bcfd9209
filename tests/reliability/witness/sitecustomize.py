"""Records which samples each rank reads in which step, in the file that ``BOARD_SAMPLES`` names.

Python imports this by itself in every process whose path begins with this folder.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import ModuleType

SAMPLER = "shardwise.train.data.sampler"


class Watch(importlib.abc.MetaPathFinder):
    """Changes the module of the sampler when it is imported, and nothing before that."""

    def find_spec(self, name, path, target=None):
        if name != SAMPLER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            watch(module.Sampler)

        spec.loader.exec_module = exec_module
        return spec


def watch(sampler: type) -> None:
    next_step = sampler.next_step

    def watched(self):
        from shardwise.launch import heartbeat

        samples = next_step(self)
        step = heartbeat._heart.beat.step if heartbeat._heart is not None else 0
        line = json.dumps([step, int(os.environ.get("RANK", "0")), samples]) + "\n"
        os.write(file, line.encode())  # one write: the lines of several ranks do not mix
        return samples

    sampler.next_step = watched


if "BOARD_SAMPLES" in os.environ:
    file = os.open(os.environ["BOARD_SAMPLES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.meta_path.insert(0, Watch())
