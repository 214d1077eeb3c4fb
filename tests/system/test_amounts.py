"""Bytes as text."""

from __future__ import annotations

import pytest

from trainer.system.amounts import file_size, memory_size


@pytest.mark.parametrize(("size", "text"), [(900, "0.9 kB"), (1_123_064, "1.1 MB"), (64.4e9, "64.40 GB")])
def test_the_size_of_a_file_is_in_decimal_units(size, text):
    assert file_size(size) == text


@pytest.mark.parametrize(("size", "text"), [(17 * 2**20, "17.00 MiB"), (2**29, "0.50 GiB"), (3 * 2**30, "3.00 GiB")])
def test_the_size_of_memory_is_in_binary_units(size, text):
    assert memory_size(size) == text
