"""Files with random changes are refused with a typed error, or give what was meant."""

import pytest

from tests.reliability import mutations


@pytest.mark.parametrize("kind", mutations.KINDS)
def test_files_with_random_changes_are_refused_or_give_what_was_meant(kind, tmp_path):
    count = 60 if kind == "optimizer" else 300  # each of these is loaded into a model, which trains
    found = mutations.run(kind, count, 7, tmp_path)
    assert found["refused"] > count // 3
