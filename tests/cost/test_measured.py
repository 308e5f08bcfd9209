"""A calibrated file: what is between its rows, and that it can be named where a GPU is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shardwise.cost.hardware import Cluster, find_gpu
from shardwise.cost.measured import (
    FORMAT,
    AttentionTime,
    LinkTime,
    Measured,
    OperationTime,
    ProductTime,
    UpdateTime,
)
from shardwise.spec.errors import ConfigError

TABLES = Measured(
    num_ranks=2,
    launch_s=2e-6,
    shared=1.0,
    products=(ProductTime("fp32", 64, 256, 256, 64e-6, 128e-6), ProductTime("fp32", 1024, 256, 256, 512e-6, 1024e-6)),
    attention=(AttentionTime("fp32", 512, 256, 8, 512, 1e-3, 3e-3),),
    operations={"add": (OperationTime("fp32", 1024, 1e-6, 2e-6), OperationTime("fp32", 4096, 7e-6, 8e-6))},
    optimizers={"adamw": (UpdateTime(1000, 1e-6), UpdateTime(10_000, 2e-5))},
    links={"all_reduce": (LinkTime(2, 1000, 1e-3), LinkTime(2, 2000, 1.5e-3))},
)
GPU = {
    "format": FORMAT,
    "name": "this machine",
    "device_type": "cpu",
    "peaks": {"fp32": 8e10},
    "memory_bytes": 1 << 33,
    "memory_bandwidth": 1e10,
    "link_bandwidth": 1e9,
    "link_domain": 2,
    "host_bandwidth": 1e10,
    "node_gbits": 0,
    "source": "shardwise calibrate",
}


def test_a_product_of_the_table_takes_what_was_measured_and_others_lie_between():
    assert TABLES.product_s(64, 256, 256, "fp32") == pytest.approx((64e-6, 128e-6))
    forward, backward = TABLES.product_s(256, 256, 256, "fp32")  # in the middle of 1e-6 and 0.5e-6 a row
    assert forward == pytest.approx(256 * 1e-6 * 0.5**0.5)
    assert backward == pytest.approx(2 * forward)
    with pytest.raises(ConfigError, match="no times of this dtype"):
        TABLES.product_s(64, 256, 256, "bf16")


def test_an_odd_number_of_columns_is_compared_with_one_more_and_is_left_out_of_other_products():
    odd = ProductTime("fp32", 1024, 256, 255, 2048e-6, 4096e-6)
    tables = dataclasses.replace(TABLES, products=(*TABLES.products, odd))
    assert tables.odd_share("fp32") == pytest.approx(0.25)
    assert tables.product_s(1024, 256, 254, "fp32") == TABLES.product_s(1024, 256, 254, "fp32")
    assert TABLES.odd_share("fp32") is None
    assert tables.odd_share("bf16") is None


def test_sizes_between_two_rows_lie_on_a_line_and_beyond_the_last_grow_in_proportion():
    assert TABLES.operation_s("add", 2560, "fp32") == pytest.approx((4e-6, 5e-6))
    assert TABLES.operation_s("add", 8192, "fp32") == pytest.approx((14e-6, 16e-6))
    assert TABLES.operation_s("add", 10, "fp32") == (1e-6, 2e-6)
    assert TABLES.update_s("adamw", 20_000) == pytest.approx(4e-5)
    assert TABLES.attention_s(1024, 256, 8, 512, "fp32") == pytest.approx((2e-3, 6e-3))


def test_links_of_more_ranks_send_a_larger_share():
    assert TABLES.link_s("all_reduce", 2, 1500) == pytest.approx(1.25e-3)
    assert TABLES.link_s("all_reduce", 4, 1500) == pytest.approx(1.25e-3 * 0.75 / 0.5)
    assert TABLES.link_s("all_reduce", 1, 1500) == 0
    with pytest.raises(ConfigError, match="calibrate --nproc 2"):
        TABLES.link_s("all_gather", 2, 1500)


def test_a_file_is_taken_where_a_gpu_is_named(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(GPU | {"measured": TABLES.as_dict()}))
    gpu = Cluster(gpu=str(path), num_gpus=2).device
    assert (gpu.name, gpu.device_type, gpu.peaks["fp32"]) == ("this machine", "cpu", 8e10)
    assert gpu.measured == TABLES
    assert find_gpu("H100-80GB-SXM").measured is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "is not a file of `shardwise calibrate`"),
        ('{"format": "other"}', "is not a file of `shardwise calibrate`"),
        (json.dumps({"format": FORMAT}), "is not as `shardwise calibrate` writes it"),
        (json.dumps({"format": FORMAT, "measured": {"products": [{"rows": 1}]}}), "is not as `shardwise calibrate`"),
        (json.dumps({"format": FORMAT, "measured": {}}), "Run `shardwise calibrate` again"),
    ],
)
def test_other_files_are_refused(tmp_path, content, fault):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=fault):
        find_gpu(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        find_gpu(str(tmp_path / "missing.json"))
