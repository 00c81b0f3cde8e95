"""What there is to compile beside the training with."""

from __future__ import annotations

import numpy as np
import pytest

from keras_speedup.engines.shadow import free_memory_bytes, relative_difference

MEGABYTE = 2**20


@pytest.mark.parametrize(
    ("limit", "free"),
    [("max\n", 900 * MEGABYTE), (f"{500 * MEGABYTE}\n", 200 * MEGABYTE), (f"{5000 * MEGABYTE}\n", 900 * MEGABYTE)],
)
def test_free_memory_is_the_hosts_within_the_containers_limit(tmp_path, limit, free):
    """The container holds 400 MB, of which 100 MB are files that it can drop."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:  2048000 kB\nMemAvailable:   {900 * 1024} kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(f"{400 * MEGABYTE}\n")
    (tmp_path / "memory.stat").write_text(f"anon {300 * MEGABYTE}\ninactive_file {100 * MEGABYTE}\n")
    assert free_memory_bytes(meminfo, tmp_path) == free


def test_free_memory_without_a_container_and_where_the_system_does_not_say(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert free_memory_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemAvailable:  1024 kB\n")
    assert free_memory_bytes(meminfo, tmp_path) == MEGABYTE


@pytest.mark.parametrize(("noise", "found"), [(0.0, 0.5), (1e-9, 0.5), (1e-7, 0.0)])
def test_what_rounding_alone_does_is_no_difference(noise, found):
    """A bias without a gradient is moved by rounding errors only, by as much on one plan as on another."""
    start, plain = [np.zeros(4), np.ones(4)], [np.full(4, 4e-7), np.ones(4)]
    other = [plain[0] + 2e-7 * np.array([1, -1, 1, -1]), plain[1]]
    nudged = [plain[0] + noise * np.array([1, 1, -1, -1]), plain[1]]
    assert relative_difference(plain, other, start, nudged) == pytest.approx(found * 0.4, abs=1e-6)


def test_wrong_number_is_a_difference_however_small_rounding_errors_are():
    plain, wrong = [np.ones(4)], [np.array([1, 1, 1, 1.01])]
    assert relative_difference(plain, wrong, [np.zeros(4)], [np.ones(4) + 1e-6]) == pytest.approx(5e-3)
