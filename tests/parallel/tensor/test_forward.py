"""What stands for a module's forward."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from shardwise.parallel.tensor.layer import ReplacedForward
from shardwise.spec.errors import StateError


class Twice(ReplacedForward):
    def __call__(self, x):
        return 2 * type(self.module).forward(self.module, x)


def test_it_is_called_in_place_of_the_classs_own_and_keeps_no_module_alive():
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    before = module(x)
    Twice(module, "layer", None).install()
    assert torch.equal(module(x), 2 * before)
    held = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
def test_the_module_refuses_to_be_copied(copies):
    module = nn.Linear(2, 2)
    Twice(module, "layer", None).install()
    with pytest.raises(StateError, match="holds only this rank's shards"):
        copies(module)
