"""Sends new weights to a vLLM server for rollouts, by vLLM's weight transfer over HTTP and NCCL.

::

    from shardwise.integrations.vllm import WeightSync

    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    def connect(address, port, world_size):  # called on rank 0 alone
        group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size)
        return PyNcclCommunicator(group, device=torch.cuda.current_device())

    sync = WeightSync("http://rollouts:8000", connect, address="trainer", port=29600)
    for step in range(steps):
        ...
        sync.send(model, version=str(step))  # on every rank

Start the server with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "nccl"}'``. HTTP carries
only commands. The tensors are broadcast in a group whose rank 0 is the trainer and whose other ranks are the server's
workers. Sources for endpoints, JSON and order: https://docs.vllm.ai/en/latest/training/weight_transfer/, its page on
the NCCL engine, and ``vllm/entrypoints/serve/dev/rlhf/api_router.py`` and
``vllm/distributed/weight_transfer/nccl_engine.py`` in https://github.com/vllm-project/vllm, read in November 2026.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor, nn

from shardwise.comm.control import fail_together
from shardwise.comm.dtype import torch_dtype
from shardwise.engine.storage.attachment import engine_of
from shardwise.spec.errors import StateError
from shardwise.weights.state.iterate import Units, iterate_full_parameters

_RESTART = "  If an update had begun, restart the server: it has old and new weights mixed, and stays paused."


class Broadcasts(Protocol):
    """A group in which this process is rank 0, such as vLLM's ``PyNcclCommunicator``.

    On a GPU it sends on the current stream, so that a tensor's memory is not reused before it was sent.
    """

    def broadcast(self, tensor: Tensor, src: int) -> object:
        """Send ``tensor``, with ``src=0``."""


class WeightSync:
    """Sends a model's parameters to one vLLM server, again after each update.

    Args:
        to: The server, ``http://host:port``.
        connect: Called once, on rank 0, with ``address``, ``port`` and the size of the group (the server's workers and
            this rank). It joins the group as rank 0, while the server's workers join it, and returns the group.
        address: Address under which the workers reach rank 0.
        port: A free port there.
        pause: What happens to running requests: ``wait`` lets them finish first, ``keep`` continues them with the new
            weights, ``abort`` ends them (vLLM's own three modes).
        timeout_s: Maximum seconds of one HTTP request.
    """

    def __init__(
        self,
        to: str,
        connect: Callable[[str, int, int], Broadcasts],
        *,
        address: str,
        port: int,
        pause: str = "wait",
        timeout_s: float = 300.0,
    ) -> None:
        self._to, self._connect, self._address, self._port = to.rstrip("/"), connect, address, port
        self._pause, self._timeout_s = pause, timeout_s
        self._group: Broadcasts | None = None

    def send(self, model: nn.Module, dtype: str = "bf16", *, version: str | None = None) -> None:
        """Replace the server's weights by the model's, tensor by tensor, while the server's generation is paused.

        Args:
            model: A parallelized model whose parameters have the names of its checkpoint. Adapters (PEFT) are not
                merged: the server would not know their names.
            dtype: The dtype in which floating-point parameters are sent. The server loads exactly these values.
            version: The name under which the server reports these weights (``/weight_info``).

        Collective:
            As ``sw.iterate_full_parameters``: all ranks must call. Only rank 0 communicates with the server, and sends
            each parameter once more, to the server's workers. No rank stores more than one full unit.

        Raises:
            StateError: The model has adapters, or the server refused a command or did not answer. Raised on every rank.
                A server that failed within an update stays paused, because old and new weights are mixed.
        """
        if hasattr(model, "peft_config"):
            raise StateError(
                "the model has adapters, whose parameters the server does not know.\n"
                "  Save the adapter (model.save_pretrained) and load it there, or send a model without adapters."
            )
        engine = engine_of(model, "WeightSync.send")
        world, cast = engine.comms.world, torch_dtype(dtype)
        update_info: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
        for extent in (each for unit in Units(engine).extents for each in unit):
            own_dtype = torch_dtype(extent.dtype)
            update_info["names"].append(extent.name)
            sent_dtype = cast if own_dtype.is_floating_point else own_dtype
            update_info["dtype_names"].append(str(sent_dtype).removeprefix("torch."))
            update_info["shapes"].append(list(extent.shape))
        error = None
        with ThreadPoolExecutor(1) as executor:
            update: Future[Any] | None = None
            if world.rank == 0:
                try:
                    self._open(executor)
                    self._ask(f"pause?mode={self._pause}")
                    self._ask("start_weight_update", {})
                    update = executor.submit(self._ask, "update_weights", {"update_info": update_info})
                except StateError as raised:
                    error = raised
            fail_together(world, error)
            for _, value in iterate_full_parameters(model, dtype):
                if update is None or error is not None or (update.done() and update.exception()):
                    continue  # all ranks must finish the iteration
                try:
                    assert self._group is not None
                    self._group.broadcast(value.contiguous(), src=0)
                except Exception as raised:  # noqa: BLE001 - the caller's group may raise anything
                    error = StateError(f"{self._to}: a broadcast to its workers failed: {raised}\n{_RESTART}")
            if update is not None and (error is None or (update.done() and update.exception())):
                try:
                    update.result()  # all tensors have arrived, or the server says why a broadcast failed
                    self._ask("finish_weight_update", {} if version is None else {"weight_version": version})
                    self._ask("resume")
                except StateError as raised:
                    error = raised
            fail_together(world, error)

    def _open(self, executor: ThreadPoolExecutor) -> None:
        """Join the group if that was not done; the server's workers join at the same time."""
        if self._group is not None:
            return
        size = 1 + self._ask("get_world_size", method="GET")["world_size"]
        info = {"master_address": self._address, "master_port": self._port, "rank_offset": 1, "world_size": size}
        joined = executor.submit(self._ask, "init_weight_transfer_engine", {"init_info": info})
        try:
            group = self._connect(self._address, self._port, size)
        except Exception as raised:
            joined.result()  # raises the server's own reason, if it has one
            raise StateError(
                f"rank 0 and the workers of {self._to} did not form a group of {size}: {raised}\n"
                f"  The workers must reach rank 0 at address={self._address!r}, port={self._port}."
            ) from raised
        joined.result()
        self._group = group

    def _ask(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        """Send a command and return the server's answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - the caller names the server
            f"{self._to}/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as raised:
            text = raised.read().decode(errors="replace")[:500]
            problem = f"{raised.code} {text}"
        except (OSError, ValueError) as raised:
            problem = str(raised)
        raise StateError(
            f"{self._to}/{path}: {problem}\n"
            '  The server needs VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\'; its log'
            f" says why it refused.\n{_RESTART}"
        )
