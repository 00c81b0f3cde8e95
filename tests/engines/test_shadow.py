"""What there is to compile beside the training with."""

from __future__ import annotations

import pytest

from keras_speedup.engines.shadow import free_memory_bytes

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
