"""An optimizer over flat tensors gives, to the last bit, what one over names gives in one plain process."""

from __future__ import annotations

import pytest
import torch

from shardwise.testing import run_on_ranks
from tests.parity import models
from tests.parity.training import PRESETS, VARIANTS, RankNumbers, differences, train_plain, train_ranks


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_flat(name: str) -> dict[tuple[str, str], RankNumbers]:
    results = {}
    for turn, variant in enumerate(VARIANTS):
        for place, preset in enumerate(PRESETS):
            is_debugging = (turn + place) % 2 == 0
            results[preset, variant.name] = train_ranks(name, preset, variant, is_debugging=is_debugging, is_flat=True)
    return results


@pytest.mark.long  # in `make test` half of tests/parity/test_parity.py is flat
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_flat_parameters_are_bitwise_equal_to_one_process_by_name(world, name):
    ranks = run_on_ranks(train_flat, world, name, timeout_s=150)
    for variant in VARIANTS:
        expected = train_plain(name, variant, world)
        for preset in PRESETS:
            found = differences(expected, [results[preset, variant.name] for results in ranks])
            assert not found, f"{preset}, {variant.name}: {found}"
