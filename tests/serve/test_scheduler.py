"""Between two steps: who begins, who leaves, who waits; on hand-made turns of a model without a model."""

from __future__ import annotations

import threading
import time

import pytest

from shardwise.generation.sample import Sampling
from shardwise.serve.completion import Completion, Event, Queue, QueueClosedError, QueueFullError
from shardwise.serve.scheduler import Scheduler

END = 9


class Client:
    """Completions, and what they are told."""

    def __init__(self, queue):
        self.queue, self.told = queue, {}

    def completion(self, length=3, count=5):
        events = []
        completion = Completion(
            [1] * length, max_new_tokens=count, sampling=Sampling(), seed=0, ends=(END,), on_event=events.append
        )
        self.told[completion.entry.number] = events
        return completion

    def add(self, *completions):
        self.queue.add(completions)
        return [completion.entry.number for completion in completions]


def numbers(order):
    return [entry.number for entry in order.new]


def test_completions_begin_in_their_order_and_leave_with_their_last_token():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 2)
    first, second, third = (client.completion(count=count) for count in (2, 5, 5))
    one, two, three = client.add(first, second, third)
    assert numbers(scheduler(0, {})) == [one, two]  # the most at a time
    order = scheduler(0, {one: 4, two: 5})
    assert (order.gone, order.new) == ([], [])
    order = scheduler(0, {one: 6, two: END})
    assert order.gone == [one, two]
    assert numbers(order) == [three]
    assert client.told[one] == [Event(4), Event(6, "length")]
    assert client.told[two] == [Event(5), Event(END, "stop")]
    assert scheduler.num_running == 1


def test_new_completions_do_not_begin_in_two_turns_after_each_other_beside_others():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 8)
    (one,) = client.add(client.completion())
    assert numbers(scheduler(0, {})) == [one]
    (two,) = client.add(client.completion())
    assert numbers(scheduler(0, {one: 1})) == []
    (three,) = client.add(client.completion())
    assert numbers(scheduler(0, {one: 1})) == [two, three]


def test_long_prompts_begin_one_after_the_other():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 8)
    added = client.add(client.completion(3000), client.completion(10), client.completion(3000))
    assert numbers(scheduler(0, {})) == added[:1]
    scheduler(0, {})
    assert numbers(scheduler(0, {})) == added[1:2]


def test_lanes_of_a_pipeline_have_about_equally_many():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 2, 8)
    added = client.add(*(client.completion() for _ in range(5)))
    assert numbers(scheduler(0, {})) == added[:3]
    assert numbers(scheduler(1, {})) == added[3:]


def test_a_completion_that_nobody_wants_leaves_the_lane_or_the_queue_and_is_told_nothing():
    queue = Queue(2)
    client, scheduler = Client(queue), Scheduler(queue, 1, 1)
    running, waiting, other = (client.completion() for _ in range(3))
    (one,) = client.add(running)
    scheduler(0, {})
    client.add(waiting, other)
    running.is_cancelled = waiting.is_cancelled = True
    order = scheduler(0, {one: 3})
    assert order.gone == [one]
    assert numbers(order) == [other.entry.number]
    assert client.told[one] == []


def test_a_full_queue_refuses_all_of_what_does_not_fit():
    queue = Queue(2)
    client = Client(queue)
    first = client.completion()
    client.add(first)
    with pytest.raises(QueueFullError):
        client.add(client.completion(), client.completion())
    assert len(queue) == 1
    first.is_cancelled = True
    client.add(client.completion(), client.completion())
    assert len(queue) == 2


def test_the_end_waits_for_completions_while_there_is_time_and_tells_the_others():
    queue, left = Queue(9), [None]
    client, scheduler = Client(queue), Scheduler(queue, 2, 2, lambda: left[0])
    one, two = client.add(client.completion(count=1), client.completion())
    scheduler(0, {}), scheduler(1, {})
    (three,) = client.add(client.completion())
    left[0] = 5.0
    order = scheduler(0, {one: 1})
    assert numbers(order) == [three]  # it had been taken before
    with pytest.raises(QueueClosedError):
        client.add(client.completion())
    assert not scheduler(1, {two: 1}).is_last
    left[0] = 0.0
    assert scheduler(0, {three: 1}).gone == [three]
    order = scheduler(1, {two: 1})
    assert order.is_last or order.gone == [two]
    assert order.is_last or scheduler(0, {}).is_last
    assert [client.told[number][-1].finish for number in (one, two, three)] == ["length", "error", "error"]
    assert "the server ends" in client.told[two][-1].error


def test_a_server_without_work_waits_and_begins_at_once_when_there_is_some(monkeypatch):
    monkeypatch.setattr("shardwise.serve.scheduler.IDLE_S", 20.0)
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 2)
    begun = time.monotonic()
    threading.Timer(0.2, lambda: client.add(client.completion())).start()
    assert len(scheduler(0, {}).new) == 1
    assert 0.15 < time.monotonic() - begun < 10
    waits = Scheduler(Queue(1), 1, 1)
    monkeypatch.setattr("shardwise.serve.scheduler.IDLE_S", 0.05)
    order = waits(0, {})
    assert (order.gone, order.new, order.is_last) == ([], [], False)
