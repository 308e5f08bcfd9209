"""An optimizer over flat tensors gives, to the last bit, what one over names gives in one plain process."""

from __future__ import annotations

import pytest

from tests.common import models
from tests.common.oracle import PRESETS
from tests.common.ranks import on_ranks
from tests.common.training import VARIANTS, train_each


@pytest.mark.long  # in `make test` half of tests/engine/test_parity.py is flat
@pytest.mark.parametrize("name", models.NAMES)
@on_ranks(1, 2, 3, 4, timeout_s=150)
def test_flat_parameters_are_bitwise_equal_to_one_process_by_name(name: str) -> None:
    for turn, variant in enumerate(VARIANTS):
        train_each(name, PRESETS, variant, is_debugging=turn % 2 == 0, flat=PRESETS)
