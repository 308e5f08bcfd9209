"""What a comparison may be asked for, and in which order engines take turns."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.compare.__main__ import main
from bench.compare.request import CASES, OURS, PEERS, SINGLE, Entrant, Request, make_requests, parse, split, turns
from shardwise.models import gpt_config
from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan

RUN = "model: {preset: gpt-nano}\ndata: {source: random, seq_len: 8}\ntrain: {micro_batch_size: 3, steps: 10}\n"


@pytest.mark.parametrize(
    ("name", "shape", "seq_len", "batch"),
    [("host", (48, 64, 256), 16, 1), ("compute", (8, 512, 8192), 256, 2), ("wide", (4, 1024, 2048), 64, 1)],
)
def test_the_three_cases_have_their_shapes(name, shape, seq_len, batch):
    case = CASES[name]
    model = gpt_config("gpt-tiny", **case.model)
    assert (model.num_layers, model.hidden, model.vocab_size) == shape
    assert (case.seq_len, case.batch) == (seq_len, batch)
    assert model.seq_len == seq_len
    assert not model.tied
    assert model.dropout == 0.0
    if name == "host":
        assert model.num_heads == 8


def test_without_case_or_configuration_all_cases_are_run_with_zero3():
    requests = make_requests(num_ranks=2)
    assert [request.case.name for request in requests] == ["host", "compute", "wide"]
    assert requests[0].entrants[0] == Entrant(OURS, "zero3")
    assert SINGLE in {entrant.engine for entrant in requests[0].entrants}
    assert requests[0].size_of(Entrant(SINGLE, "none")) == 1
    assert requests[0].size_of(requests[0].entrants[0]) == 2


def test_a_configuration_gives_model_and_data(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RUN)
    (request,) = make_requests(config=path, strategies=["ddp", "DDP", "zero1"], peers=["torch-ddp"], num_ranks=2)
    assert (request.case.seq_len, request.case.batch, request.case.config) == (8, 3, str(path))
    assert [entrant.name for entrant in request.entrants] == ["shardwise ddp", "shardwise zero1", "torch-ddp"]
    assert str(tmp_path) not in str(request.case)


def test_a_request_survives_json():
    (request,) = make_requests(
        cases=["wide"], peers=[peer for peer in PEERS if "deepspeed" not in peer], num_ranks=3, rounds=7, steps=2
    )
    again = Request.from_dict(json.loads(json.dumps(request.as_dict())))
    assert again == request
    assert again.case.steps == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "torch-fsdp3"], "Did you mean 'torch-fsdp2'"),
        (["--peers", "megatron"], "Use one of single, torch-ddp, torch-fsdp1, torch-fsdp2"),
        (["--case", "hots"], "Did you mean 'host'"),
        (["--strategies", "zero9"], "zero9"),
        (["--rounds", "0"], "expected at least 1"),
        (["--steps", "0"], "expected at least 1"),
        (["--nproc", "0"], "at least 1 is needed"),
        (["RUN", "--case", "host"], "exclude each other"),
        (["MISSING"], "missing.yaml"),
        (["BF16", "--peers", "torch-ddp"], "mp_policy rounds numbers"),
        (["FULL"], "parallel.activation_checkpointing, parallel.compile would act on our engine alone"),
        (["FULL"], "the peers (single, torch-ddp, torch-fsdp1, torch-fsdp2) train the model as it is"),
        (["--case", "host", "--strategies", "zero3,zero3+dp_shard=3"], "dp_shard=3"),
        (["--case", "host", "--strategies", "zero3+reshard_after_forward=3"], "reshard_after_forward=3"),
        (["--case", "host", "--strategies", "data_parallel+dp_shard=2"], "dp_shard=2"),
        (["RUN", "--strategies", "hsdp+dp_replicate=4"], "dp_replicate=4"),
        (["--case", "host", "--strategies", "zero3+mp_policy={param_dtype: bf61}"], "bf61"),
    ],
)
def test_mistakes_leave_with_78_before_a_process_starts(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr("bench.compare.run.launch", lambda *_, **__: pytest.fail("workers were started"))
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "bf16.yaml").write_text(RUN + "parallel: {mp_policy: {param_dtype: bf16}}\n")
    (tmp_path / "full.yaml").write_text(RUN + "parallel: {activation_checkpointing: full, compile: true}\n")
    paths = {name: str(tmp_path / f"{name.lower()}.yaml") for name in ("RUN", "BF16", "FULL", "MISSING")}
    assert main(["--nproc", "2", *(paths.get(argument, argument) for argument in arguments)]) == 78
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_a_result_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    assert main(["--case", "host", "--json", str(tmp_path)]) == 78
    (tmp_path / "file").write_text("")
    assert main(["--case", "host", "--json", str(tmp_path / "file" / "result.json")]) == 74
    assert "cannot be written" in capsys.readouterr().err


def test_compare_refuses_to_be_one_of_many(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["--case", "host"]) == 78


def test_turns_are_permutations_that_start_later_and_run_both_ways():
    assert [turns(3, number) for number in range(6)] == [
        [0, 1, 2],
        [2, 1, 0],
        [1, 2, 0],
        [0, 2, 1],
        [2, 0, 1],
        [1, 0, 2],
    ]
    assert turns(1, 5) == [0]


def test_asking_needs_no_torch():
    code = (
        "import sys\nfrom bench.compare.request import make_requests\nmake_requests(num_ranks=2)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_peers_our_strategies_may_compute_as_the_configuration_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN + "parallel: {mp_policy: {param_dtype: bf16}}\n")
    (request,) = make_requests(config=path, strategies=["zero3", "zero2"], peers=[], num_ranks=2)
    assert [entrant.engine for entrant in request.entrants] == [OURS, OURS]
    path.write_text(RUN + "parallel: {gradient_buffers: 1}\n")  # the same work
    assert make_requests(config=path, peers=["torch-ddp"], num_ranks=2)


def test_the_error_for_an_unknown_name_escapes_it():
    with pytest.raises(ConfigError) as caught:
        make_requests(peers=["\x1b[2J"], num_ranks=1)
    assert "\x1b" not in str(caught.value)


def test_deepspeed_stands_for_its_three_stages(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (request,) = make_requests(cases=["wide"], peers=["torch-ddp", "deepspeed", "deepspeed-2"], num_ranks=2)
    assert [entrant.engine for entrant in request.entrants] == [
        OURS,
        "torch-ddp",
        "deepspeed-1",
        "deepspeed-2",
        "deepspeed-3",
    ]
    assert request.entrants[-1].strategy == "zero3"


def test_a_peer_that_is_not_installed_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"deepspeed-1, deepspeed-2, .*not installed.*\n.*shardwise\[peers\]"):
        make_requests(cases=["wide"], peers=["deepspeed"], num_ranks=2)


def test_a_variant_names_what_else_differs():
    variant = parse("zero3+flat+reshard_after_forward=false")
    assert (variant.strategy, variant.is_flat, variant.fields) == ("zero3", True, {"reshard_after_forward": False})
    assert variant.applied_to(ParallelPlan(accumulation="sharded")).accumulation == "sharded"
    assert make_requests(cases=["host"], strategies=["ZeRO3+flat"], num_ranks=2)[0].entrants[0].strategy == "zero3+flat"


MIXED = "ZERO3+mp_policy={param_dtype: bf16, reduce_dtype: fp32}"
NAMED = "zero3+auto_wrap_policy={by_class: [Block, GPTBlock]}+flat"


def test_values_are_yaml_whose_commas_and_capitals_stay(monkeypatch):
    """Up to the request, by the verb; nothing is started."""
    asked = []
    monkeypatch.setattr("bench.compare.run.run", lambda request: asked.append(request) or sys.exit(0))
    main(["--case", "host", "--peers", "single", "--strategies", f"ddp, {MIXED} ,{NAMED},ddp"])
    (request,) = asked
    ours = [entrant.strategy for entrant in request.entrants if entrant.engine == OURS]
    assert ours == ["ddp", MIXED.replace("ZERO3", "zero3"), NAMED]
    assert parse(ours[1]).applied_to(ParallelPlan()).precision.param_dtype == "bf16"
    assert parse(ours[2]).fields == {"auto_wrap_policy": {"by_class": ["Block", "GPTBlock"]}}
    assert parse(ours[2]).is_flat


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("a={x: 1, y: [2, 3]},b", ["a={x: 1, y: [2, 3]}", "b"]),
        ("a='1,2',b", ["a='1,2'", "b"]),
        ('a="{",b', ['a="{"', "b"]),
        ("a},b", ["a}", "b"]),
        ("", [""]),
    ],
)
def test_marks_in_brackets_and_quotes_do_not_cut(text, parts):
    assert split(text, ",") == parts


@pytest.mark.parametrize("text", ["zero3+mp_policy={param_dtype: bf16", "zero3+sync=@", "zero3+sync='a"])
def test_a_value_that_is_no_yaml_is_refused_in_our_words(text):
    with pytest.raises(ConfigError, match=r"is no YAML: .*\n  Write it as in a configuration file"):
        parse(text)


@pytest.mark.parametrize("text", ["zero3+falt", "zero3+nosuch=1", "zero3+strategy=ddp", "zero3+"])
def test_an_unknown_variant_is_refused(text):
    with pytest.raises(ConfigError, match="is neither 'flat' nor FIELD=VALUE"):
        parse(text)
