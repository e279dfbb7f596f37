"""What tests of kernels share."""

import os

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where kernels compiled for the host lie: one place for all test files and all workers of a
    run.
    """
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "host"
    found.mkdir(exist_ok=True)
    return found
