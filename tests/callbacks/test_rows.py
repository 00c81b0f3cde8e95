"""Files of rows: whole, aligned, appended to."""

from __future__ import annotations

import csv
import json

import pytest

from keras_speedup.callbacks.rows import RowFile


def test_row_without_a_column_stays_aligned(tmp_path):
    file = RowFile(tmp_path / "new" / "rows.csv", ("a", "b", "c"))
    file.append({"a": 1, "b": 2, "c": 3})
    file.append({"a": 4, "c": 6})
    with file.path.open() as opened:
        assert list(csv.DictReader(opened)) == [{"a": "1", "b": "2", "c": "3"}, {"a": "4", "b": "", "c": "6"}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_line_that_was_torn_spoils_no_other(tmp_path, name):
    file = RowFile(tmp_path / name, ("a", "b"))
    file.append({"a": 1, "b": 2})
    whole = file.path.read_text()
    file.path.write_text(whole + whole.splitlines()[-1][:-2])
    RowFile(tmp_path / name, ("a", "b")).append({"a": 3, "b": 4})
    lines = file.path.read_text().splitlines()
    assert lines[:-2] == whole.splitlines()
    assert lines[-1] == ("3,4" if name == "rows.csv" else json.dumps({"a": 3, "b": 4}))


def test_file_of_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="has the columns 'x,y', expected 'a,b'"):
        RowFile(path, ("a", "b"))
    assert path.read_text() == "x,y\n1,2\n"
