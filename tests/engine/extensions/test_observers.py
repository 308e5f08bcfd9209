"""The order in which observers are told of a moment. A forward is refused before anything watches what it saves."""

import torch
from torch import nn

import shardwise as sw
from shardwise.engine.attach import Step, Window
from shardwise.engine.storage.attachment import engine_of


def build() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return sw.parallelize(nn.Sequential(block, nn.Linear(4, 4)), sw.ParallelPlan(strategy="zero3"))


def test_a_stream_of_tokens_leaves_gradient_sync_as_the_caller_sets_it_meanwhile():
    for is_last in (False, True):
        window = Window("sharded")
        window.sync(is_last=not is_last)
        with window.override(step=Step()):
            window.sync(is_last=is_last)
        assert window.syncs is is_last


def test_buffers_are_synchronised_first_and_saved_tensors_are_watched_last() -> None:
    model = build()
    engine = engine_of(model, "a test")
    called = [type(method.__self__).__name__ for method in engine.extras.forward_begins]
    assert called == ["BufferSync", "InsideDDP", "RefusesAdded", "RestoresParts", "SavedTensors", "LostWrites"]


def test_backward_shows_gradients_before_an_optimizer_inside_it_may_take_them() -> None:
    model = build()
    with sw.gradient_sync(model, False):
        pass  # from now on sums may wait
    sw.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    observers = engine_of(model, "a test").extras
    begun = [type(method.__self__).__name__ for method in observers.backward_begins]
    assert begun == ["ForeignBackwards", "WaitingSums"]
    ended = [type(method.__self__).__name__ for method in observers.backward_ended]
    assert ended == ["SavedTensors", "WaitingSums", "UpdateInBackward"]
