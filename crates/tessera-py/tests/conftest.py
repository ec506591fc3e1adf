"""What all tests share."""

from collections.abc import Iterator

import numpy as np
import pytest
from tessera import runtime as rt


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(autouse=True)
def restore_stream_settings() -> Iterator[None]:
    """Leaves the settings of streams, which belong to the process, as they were before the test."""
    ids, pairs = rt.stream_settings()
    yield
    rt.set_stream_map(ids)
    rt.enable_overlap(pairs)
