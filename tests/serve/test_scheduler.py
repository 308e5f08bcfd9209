"""Between two steps: who begins, who leaves, who waits; on hand-made turns of a model without a model."""

from __future__ import annotations

import threading
import time

import pytest

from shardwise.generation.sample import Sampling
from shardwise.serve.queue import Event, GenerationRequest, Queue, QueueClosedError, QueueFullError
from shardwise.serve.scheduler import Scheduler

END = 9


class Client:
    """Requests, and the events of each."""

    def __init__(self, queue):
        self.queue, self.events = queue, {}

    def request(self, length=3, count=5):
        events = []
        request = GenerationRequest(
            [1] * length, max_new_tokens=count, sampling=Sampling(), seed=0, ends=(END,), on_event=events.append
        )
        self.events[request.entry.number] = events
        return request

    def add(self, *requests):
        self.queue.add(requests)
        return [request.entry.number for request in requests]


def numbers(decision):
    return [entry.number for entry in decision.new]


def test_requests_begin_in_their_order_and_leave_with_their_last_token():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 2)
    first, second, third = (client.request(count=count) for count in (2, 5, 5))
    one, two, three = client.add(first, second, third)
    assert numbers(scheduler(0, {})) == [one, two]  # the most at a time
    decision = scheduler(0, {one: 4, two: 5})
    assert (decision.removed, decision.new) == ([], [])
    decision = scheduler(0, {one: 6, two: END})
    assert decision.removed == [one, two]
    assert numbers(decision) == [three]
    assert client.events[one] == [Event(4), Event(6, "length")]
    assert client.events[two] == [Event(5), Event(END, "stop")]
    assert scheduler.num_running == 1


def test_new_requests_do_not_begin_in_two_turns_after_each_other_beside_others():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 8)
    (one,) = client.add(client.request())
    assert numbers(scheduler(0, {})) == [one]
    (two,) = client.add(client.request())
    assert numbers(scheduler(0, {one: 1})) == []
    (three,) = client.add(client.request())
    assert numbers(scheduler(0, {one: 1})) == [two, three]


def test_long_prompts_begin_one_after_the_other():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 8)
    added = client.add(client.request(3000), client.request(10), client.request(3000))
    assert numbers(scheduler(0, {})) == added[:1]
    scheduler(0, {})
    assert numbers(scheduler(0, {})) == added[1:2]


def test_batches_of_a_pipeline_have_about_equally_many():
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 2, 8)
    added = client.add(*(client.request() for _ in range(5)))
    assert numbers(scheduler(0, {})) == added[:3]
    assert numbers(scheduler(1, {})) == added[3:]


def test_a_request_that_nobody_wants_leaves_the_batch_or_the_queue_and_is_told_nothing():
    queue = Queue(2)
    client, scheduler = Client(queue), Scheduler(queue, 1, 1)
    running, waiting, other = (client.request() for _ in range(3))
    (one,) = client.add(running)
    scheduler(0, {})
    client.add(waiting, other)
    running.is_cancelled = waiting.is_cancelled = True
    decision = scheduler(0, {one: 3})
    assert decision.removed == [one]
    assert numbers(decision) == [other.entry.number]
    assert client.events[one] == []


def test_a_full_queue_refuses_all_of_what_does_not_fit():
    queue = Queue(2)
    client = Client(queue)
    first = client.request()
    client.add(first)
    with pytest.raises(QueueFullError):
        client.add(client.request(), client.request())
    assert len(queue) == 1
    first.is_cancelled = True
    client.add(client.request(), client.request())
    assert len(queue) == 2


def test_the_end_waits_for_requests_while_there_is_time_and_tells_the_others():
    queue, left = Queue(9), [None]
    client, scheduler = Client(queue), Scheduler(queue, 2, 2, lambda: left[0])
    one, two = client.add(client.request(count=1), client.request())
    scheduler(0, {}), scheduler(1, {})
    (three,) = client.add(client.request())
    left[0] = 5.0
    decision = scheduler(0, {one: 1})
    assert numbers(decision) == [three]  # it had been taken before
    with pytest.raises(QueueClosedError):
        client.add(client.request())
    assert not scheduler(1, {two: 1}).is_last
    left[0] = 0.0
    assert scheduler(0, {three: 1}).removed == [three]
    decision = scheduler(1, {two: 1})
    assert decision.is_last or decision.removed == [two]
    assert decision.is_last or scheduler(0, {}).is_last
    assert [client.events[number][-1].finish for number in (one, two, three)] == ["length", "error", "error"]
    assert "the server ends" in client.events[two][-1].error


def test_a_server_without_work_waits_and_begins_at_once_when_there_is_some(monkeypatch):
    monkeypatch.setattr("shardwise.serve.scheduler.IDLE_S", 20.0)
    queue = Queue(9)
    client, scheduler = Client(queue), Scheduler(queue, 1, 2)
    begun = time.monotonic()
    threading.Timer(0.2, lambda: client.add(client.request())).start()
    assert len(scheduler(0, {}).new) == 1
    assert 0.15 < time.monotonic() - begun < 10
    waits = Scheduler(Queue(1), 1, 1)
    monkeypatch.setattr("shardwise.serve.scheduler.IDLE_S", 0.05)
    decision = waits(0, {})
    assert (decision.removed, decision.new, decision.is_last) == ([], [], False)
