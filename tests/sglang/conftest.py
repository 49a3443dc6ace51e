"""Fixtures for tests on real launches: see README.md beside this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_lab


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def sglang_environment():
    """SGLang 0.5.9, installed on first use."""
    return sglang_lab.environment()


@pytest.fixture
def lab(sglang_environment, tmp_path):
    """Start servers: `lab.launch("hang-io") -> Launched`; all end with the test."""
    lab = sglang_lab.Lab(sglang_environment, tmp_path)
    yield lab
    lab.close()
