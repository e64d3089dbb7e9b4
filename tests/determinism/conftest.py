"""One subject and one set of requests with their references, shared by the tests of the harness."""

from __future__ import annotations

import pytest

from deepinfer.testing.invariance import Bench
from tests.determinism.subjects import HashSubject


@pytest.fixture(scope="session")
def subject() -> HashSubject:
    """The real engine on a device of hashes; no test changes it."""
    return HashSubject()


@pytest.fixture(scope="session")
def bench(subject: HashSubject) -> Bench:
    """Three requests: sampled, greedy, and with penalties."""
    return Bench(subject, requests=3, seed=1)
