"""Options of the whole suite."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="where the tests marked gpu train")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """`--device`; a test that asks for CUDA where there is none is skipped."""
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name
