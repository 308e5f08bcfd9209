"""The model of a Triton repository for Triton's Python backend, used by the ``model.py`` of ``export --triton``.

Inputs and output are those of Triton's vLLM backend, so that clients need not know which backend answers. Prompts of
all requests go through the model together, in a separate thread, and each answer is sent as it is generated.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.generation.continuous import ContinuousBatcher
from shardwise.launch.world import World
from shardwise.serve.protocol import RequestError, Served, read_completion
from shardwise.serve.queue import Event, GenerationRequest, Queue, QueueClosedError, QueueFullError
from shardwise.serve.scheduler import Scheduler
from shardwise.serve.text import Text
from shardwise.spec.errors import ShardwiseError
from shardwise.train.load import find_model


class TritonPythonModel:
    """A model of Triton's Python backend; its methods are called by Triton."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; returns when it is ready.

        Raises:
            ShardwiseError: The model cannot be loaded.
        """
        _take_device(args)
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"] / parameters["model"]
        self._trained = find_model(folder)
        self._tokenizer = self._trained.tokenizer()
        self._name = args["model_name"]
        self._queue = Queue(int(parameters["max_waiting"]))
        self._max_rows = int(parameters["max_rows"])
        self._served: Served | None = None
        self._error: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-model", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._error is not None:
            raise self._error

    def execute(self, requests: Sequence[Any]) -> None:
        """Start answering requests. Answers are sent as they are generated."""
        for request in requests:
            answer = _Answer(request.get_response_sender())
            try:
                answer.begin(request, self._served, self._queue)
            except (RequestError, ShardwiseError) as error:
                answer.refuse(str(error))
            except QueueFullError:
                answer.refuse(f"{len(self._queue)} prompts wait already, of at most {self._queue.max_waiting}")
            except QueueClosedError:
                answer.refuse("the model is about to end")

    def finalize(self) -> None:
        """Complete the running answers and stop."""
        self._queue.close()
        self._thread.join()

    def _run(self) -> None:
        scheduler: Scheduler | None = None
        try:
            world = World()
            resolved = self._trained.resolve([], world.size)
            self._trained.check_continues(resolved)
            with self._trained.loaded(resolved, world, is_averaged=False) as model:
                batcher = ContinuousBatcher(model)
                self._served = Served(self._name, self._tokenizer, batcher.vocab_size, batcher.positions)
                scheduler = Scheduler(self._queue, batcher.num_batches, self._max_rows)
                self._is_ready.set()
                batcher.run(scheduler)
        except BaseException as error:  # noqa: BLE001 - Triton must be notified of any error
            self._error = error
            if scheduler is not None:
                scheduler.fail(f"the model has failed: {error}")
        finally:
            self._queue.close()
            self._is_ready.set()


def _take_device(args: dict[str, str]) -> None:
    """Make only the device visible that Triton has assigned to the instance."""
    device = int(args["model_instance_device_id"])
    if args["model_instance_kind"] == "GPU" and device >= 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
    elif args["model_instance_kind"] == "CPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class _Answer:
    """The answer to one request."""

    def __init__(self, sender: Any) -> None:
        import triton_python_backend_utils  # pyrefly: ignore[missing-import] - exists only inside Triton

        self._utils, self._sender = triton_python_backend_utils, sender
        self._text: Text | None = None
        self._request: GenerationRequest | None = None
        self._is_stream = False
        self._said = ""

    def begin(self, request: Any, served: Served | None, queue: Queue) -> None:
        """Queue the request's prompt.

        Raises:
            QueueFullError: Too many prompts wait.
            QueueClosedError: The model is stopping.
        """
        assert served is not None
        prompt = self._input(request, "text_input", b"").decode("utf-8", "replace")
        self._is_stream = bool(self._input(request, "stream", default=False))
        excludes = bool(self._input(request, "exclude_input_in_output", default=self._is_stream))
        try:
            parameters = json.loads(self._input(request, "sampling_parameters", b"{}") or b"{}")
        except ValueError as error:
            raise RequestError(f"sampling_parameters is not JSON: {error}") from None
        if not isinstance(parameters, dict):
            raise RequestError("sampling_parameters is not a JSON object")
        parsed = read_completion({**parameters, "model": served.name, "prompt": prompt}, served)
        if parsed.num_top is not None or parsed.has_echo:
            raise RequestError("logprobs and echo are not supported in Triton: leave them out")
        self._text = Text(served.tokenizer, parsed.prompts[0], parsed.stops)
        self._said = "" if excludes else prompt
        self._request = GenerationRequest(
            parsed.prompts[0],
            max_new_tokens=parsed.max_new_tokens,
            sampling=parsed.sampling,
            seed=parsed.seed,
            ends=parsed.ends,
            on_event=self._send_event,
        )
        queue.add([self._request])

    def refuse(self, why: str) -> None:
        """End the answer with an error."""
        error = self._utils.TritonError(why)
        self._send(self._utils.InferenceResponse(error=error), is_last=True)

    def _send_event(self, event: Event) -> None:
        """Send the text that is certain after an event of the completion, in the model's thread."""
        assert self._text is not None
        assert self._request is not None
        if event.finish == "error":
            self.refuse(event.error)
            return
        if self._sender.is_cancelled():
            self._request.is_cancelled = True
            self._send(None, is_last=True)
            return
        if event.token is not None and event.finish != "stop":
            self._said += self._text.add(event.token)
        if event.finish is not None:
            self._said += self._text.end()
        is_last = event.finish is not None or self._text.is_stopped
        if self._text.is_stopped:
            self._request.is_cancelled = True
        if is_last or (self._is_stream and self._said):
            text = np.array([self._said.encode()], dtype=np.object_)
            self._said = ""
            output = self._utils.Tensor("text_output", text)
            self._send(self._utils.InferenceResponse(output_tensors=[output]), is_last=is_last)

    def _send(self, response: Any, *, is_last: bool) -> None:
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        if response is None:
            self._sender.send(flags=flags)
        else:
            self._sender.send(response, flags=flags)

    def _input(self, request: Any, name: str, default: Any) -> Any:
        found = self._utils.get_input_tensor_by_name(request, name)
        return default if found is None else found.as_numpy().reshape(-1)[0]
