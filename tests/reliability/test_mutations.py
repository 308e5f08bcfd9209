"""Files with random changes are refused with a typed error, or give what was meant."""

import pytest

from tests.reliability import mutations


@pytest.mark.parametrize("kind", mutations.KINDS)
def test_files_with_random_changes_are_refused_or_give_what_was_meant(kind, tmp_path):
    found = mutations.run(kind, 300, 7, tmp_path)
    assert found["refused"] > 100
