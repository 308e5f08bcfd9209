"""Weight transfer to a stub of a vLLM server: its endpoints in their order, and the tensors bit for bit."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.integrations.vllm import WeightSync
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal
from tests.launch.test_join import free_port


class Group:
    """A group of two over gloo, in place of NCCL."""

    def __init__(self, address: str, port: int, world_size: int, rank: int = 0) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=30))
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=30))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()


class Broken:
    def __init__(self, *_args: object) -> None:
        """Nobody has to join it."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        raise OSError(f"no way for {tensor.numel()} elements from {src}")


class BrokenByRefusal(Broken):
    """Fails when the server has refused meanwhile, as a group does that waits for the workers until a time-out."""

    begun, refused = threading.Event(), threading.Event()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self.begun.set()
        assert self.refused.wait(10)
        time.sleep(0.1)  # until the answer was read
        super().broadcast(tensor, src)


def no_group(*_args: object) -> Broken:
    raise OSError("nobody came")


class Server(ThreadingHTTPServer):
    """What vLLM documents: one worker that joins the group, is told names and shapes, and receives tensor by tensor."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.calls: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.version: str | None = None
        self.refuses = ""
        self.is_idle = False  # answers without doing anything
        self.group: Group | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        self.calls.append(path)
        if path == self.refuses:
            assert not self.is_idle or BrokenByRefusal.begun.wait(10)
            raise ValueError("out of memory")
        if self.is_idle:
            return {"world_size": 1}
        match path:
            case "/get_world_size":
                return {"world_size": 1}
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                rank = info["rank_offset"]  # of worker 0
                self.group = Group(info["master_address"], info["master_port"], info["world_size"], rank)
            case "/update_weights":
                info = body["update_info"]
                for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                    assert self.group is not None
                    self.weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                    self.group.broadcast(self.weights[name], src=0)
            case "/finish_weight_update":
                self.version = body.get("weight_version")
        return {"message": "done"}


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        try:
            code, said = 200, self.server.answer(self.path, json.loads(self.rfile.read(length) or b"null"))
        except ValueError as error:
            code, said = 500, {"error": str(error)}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())
        if code == 500 and self.server.is_idle:
            BrokenByRefusal.refused.set()

    do_GET = do_POST  # noqa: N815 - the name that the base class calls

    def log_message(self, *_args: object) -> None:
        """Nothing."""


_ROUND = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def send_on_rank(plan: sw.ParallelPlan, port: int) -> None:
    model = sw.parallelize(sw.models.gpt("gpt-tiny", num_layers=2, hidden=24, num_heads=4, vocab_size=31), plan)
    server = Server() if dist.get_rank() == 0 else None
    to = f"http://127.0.0.1:{server.server_port}" if server is not None else "http://unused"
    sync = WeightSync(to, Group, address="127.0.0.1", port=port)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for version in ("1", None):
        sync.send(model, version=version)
        whole = sw.full_state_dict(model)
        if server is not None:
            names = [name for name, _ in model.named_parameters()]
            assert sorted(server.weights) == sorted(names)
            assert all(torch.equal(server.weights[name], whole[name].bfloat16()) for name in names)
            assert server.version == version
            start = [] if version is None else ["/get_world_size", "/init_weight_transfer_engine"]
            assert server.calls == [*start, *_ROUND]  # the group is joined once
            server.calls.clear()
        model(torch.arange(8)[None]).sum().backward()
        optimizer.step()
    sync.send(model, "fp32")
    whole = sw.full_state_dict(model)
    if server is not None:
        assert all(torch.equal(value, whole[name]) for name, value in server.weights.items())
        server.calls.clear()
        server.refuses = "/update_weights"
    assert "update_weights: 500" in refusal(StateError, sync.send, model)  # on both ranks
    assert server is None or server.calls == _ROUND[:3]  # it stays paused
    if server is not None:
        server.is_idle = True
    refusing = WeightSync(to, BrokenByRefusal, address="127.0.0.1", port=port)
    assert "update_weights: 500" in refusal(StateError, refusing.send, model)  # not what came of it
    if server is not None:
        server.calls.clear()
        server.refuses = ""
    broken = WeightSync(to, Broken, address="127.0.0.1", port=port)
    assert "no way for" in refusal(StateError, broken.send, model)
    assert server is None or server.calls[2:] == _ROUND[:3]
    alone = WeightSync(to, no_group, address="127.0.0.1", port=port)
    assert f"port={port}" in refusal(StateError, alone.send, model)
    model.peft_config = {}
    assert "has adapters" in refusal(StateError, sync.send, model)


@pytest.mark.parametrize("plan", [sw.ParallelPlan(strategy="zero3"), sw.ParallelPlan(tp=2)], ids=["zero3", "tp2"])
def test_the_server_gets_each_parameter_bit_for_bit(plan: sw.ParallelPlan) -> None:
    run_on_ranks(send_on_rank, 2, plan, free_port(), timeout_s=120)
