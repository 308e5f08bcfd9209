"""The model repository that `shardwise export --triton` writes: parsed as Triton parses it, and run under a stub."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from importlib.metadata import files

import numpy as np
import pytest

from shardwise.cli import main
from shardwise.spec.errors import CheckpointError
from shardwise.testing import run_on_ranks
from tests.common.tokenizers import save_model, save_tokenizer
from tests.generation.test_generate_command import say

COUNT = 9
PROMPTS = ["def number", "One hundred and 7", "naïve"]


def read_config(path):
    """What Triton's own schema says of a ``config.pbtxt``."""
    from google.protobuf import text_format

    schema = next(file for file in files("tritonclient") if file.match("grpc/model_config_pb2.py"))
    spec = importlib.util.spec_from_file_location("model_config_pb2", schema.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # by itself: the package beside it needs grpc
    return module, text_format.Parse(path.read_text(), module.ModelConfig())


class Tensor:
    def __init__(self, name, values):
        self.name, self._values = name, values

    def as_numpy(self):
        return self._values


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.texts = [tensor.as_numpy()[0].decode() for tensor in output_tensors]
        self.error = error


class Sender:
    """Takes what Triton would send."""

    def __init__(self, leaves_after=None):
        self.sent, self.is_over = [], threading.Event()
        self._leaves_after = leaves_after

    def send(self, response=None, flags=0):
        assert not self.is_over.is_set()
        if response is not None:
            self.sent.append(response)
        if flags:
            self.is_over.set()

    def is_cancelled(self):
        return self._leaves_after is not None and len(self.sent) >= self._leaves_after


class Request:
    def __init__(self, text, *, leaves_after=None, **inputs):
        self.sender = Sender(leaves_after)
        self.inputs = {"text_input": np.array([text.encode()], np.object_)}
        for name, value in inputs.items():
            is_flag = isinstance(value, bool)
            self.inputs[name] = np.array(
                [value if is_flag else json.dumps(value).encode()], bool if is_flag else object
            )

    def get_response_sender(self):
        return self.sender

    def answer(self):
        assert self.sender.is_over.wait(60)
        errors = [response.error for response in self.sender.sent if response.error]
        return errors[0] if errors else [text for response in self.sender.sent for text in response.texts]


@pytest.fixture
def stub(monkeypatch):
    module = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, str
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    def get_input(request, name):
        return Tensor(name, request.inputs[name]) if name in request.inputs else None

    module.get_input_tensor_by_name = get_input
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def started(repository, config):
    """The model of ``model.py``, ready, as Triton's stub process makes it."""
    from google.protobuf import json_format

    spec = importlib.util.spec_from_file_location("model", repository / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({
        "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
        "model_repository": str(repository), "model_version": "1", "model_name": repository.name,
        "model_instance_kind": "CPU", "model_instance_device_id": "0",
    })  # fmt: skip
    return model


@pytest.fixture
def folder(tmp_path):
    return save_model(save_tokenizer(tmp_path / "tiny"), vocab_size=300)


def test_the_python_model_says_what_generate_says_streamed_and_at_once(folder, tmp_path, stub, capsys):
    assert main(["export", str(folder), "--triton", str(tmp_path / "repository"), "--name", "llama"]) == 0
    assert "tritonserver --model-repository" in capsys.readouterr().out
    repository = tmp_path / "repository" / "llama"
    schema, config = read_config(repository / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("llama", "python", 0)
    assert config.model_transaction_policy.decoupled
    assert [(each.name, each.data_type, list(each.dims), each.optional) for each in config.input] == [
        ("text_input", schema.TYPE_STRING, [1], False),
        ("stream", schema.TYPE_BOOL, [1], True),
        ("sampling_parameters", schema.TYPE_STRING, [1], True),
        ("exclude_input_in_output", schema.TYPE_BOOL, [1], True),
    ]
    assert [(each.name, each.data_type) for each in config.output] == [("text_output", schema.TYPE_STRING)]

    calls = [[str(folder), f"--prompt={prompt}", f"--max-new-tokens={COUNT}", "--json"] for prompt in PROMPTS]
    printed = run_on_ranks(say, 1, str(tmp_path), calls, timeout_s=120)[0]
    expected = [json.loads(text)["text"] for _, text in printed]

    model = started(repository, config)
    try:
        greedy = {"temperature": 0, "max_tokens": COUNT}
        requests = [
            Request(PROMPTS[0], stream=True, sampling_parameters=greedy),
            Request(PROMPTS[1], exclude_input_in_output=True, sampling_parameters=greedy),
            Request(PROMPTS[2], sampling_parameters=greedy),
        ]
        model.execute(requests[:1])
        model.execute(requests[1:])
        streamed, excluded, whole = (request.answer() for request in requests)
        assert "".join(streamed) == expected[0]
        assert excluded == [expected[1]]
        assert whole == [PROMPTS[2] + expected[2]]
        long = Request(PROMPTS[0], stream=True, leaves_after=1, sampling_parameters={"max_tokens": 40, "seed": 1})
        wrong = [
            (Request("x", sampling_parameters={"logprobs": 1}), "logprobs and echo are not supported in Triton"),
            (Request("x", sampling_parameters={"echo": True}), "logprobs and echo are not supported in Triton"),
            (Request("x", sampling_parameters={"n": 2}), "a request gets at most 1"),
            (Request("x", sampling_parameters={"max_tokens": 1000}), "there are 64"),
            (Request("x", sampling_parameters=[1]), "not a JSON object"),
            (Request(""), "prompt 0 is empty"),
        ]
        model.execute([long, *(request for request, _ in wrong)])
        assert len(long.answer()) == 1  # and the model goes on with others
        for request, message in wrong:
            assert message in request.answer()
    finally:
        model.finalize()
    late = Request("x")
    model.execute([late])
    assert late.answer() == "the model is about to end"


def test_a_model_that_cannot_be_loaded_is_an_error_of_initialize(folder, tmp_path, stub):
    assert main(["export", str(folder), "--triton", str(tmp_path / "repository")]) == 0
    repository = tmp_path / "repository" / "tiny"
    _, config = read_config(repository / "config.pbtxt")
    (folder / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="safetensors"):
        started(repository, config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        started(repository, config)


def test_the_vllm_backend_gets_its_engine_s_arguments(folder, tmp_path, capsys):
    repository = tmp_path / 'a "quoted" name'
    assert main(["export", str(folder), "--triton", str(repository), "--backend", "vllm"]) == 0
    schema, config = read_config(repository / "tiny" / "config.pbtxt")
    assert (config.name, config.backend) == ("tiny", "vllm")
    assert [group.kind for group in config.instance_group] == [schema.ModelInstanceGroup.KIND_MODEL]
    assert json.loads((repository / "tiny" / "1" / "model.json").read_text()) == {"model": str(folder)}
    for arguments, message in [
        ([str(folder), "--triton", str(repository)], "tiny exists"),
        ([str(folder), "--triton", str(repository), "--name", "../out"], "is not a name of a folder"),
        ([str(folder)], "the model goes to one place"),
        ([str(folder), "out", "--backend", "vllm"], "--name and --backend are for Triton"),
        ([str(folder), "out", "--triton", str(repository)], "the model goes to one place"),
    ]:
        capsys.readouterr()
        assert main(["export", *arguments]) == 78, arguments
        assert message in capsys.readouterr().err
