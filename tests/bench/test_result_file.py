"""Result files that a run was cut off while writing: mended before the next row, and nothing else
is lost."""

import json

import pytest

from flyweight.bench.rows import ResultFile, make_row


def rows(*notes):
    skipped = [make_row("latency", "e", status="skipped", note=note) for note in notes]
    return [make_row("environment", "e", id="e", device="cpu"), *skipped]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "result.jsonl"
    ResultFile(path).append(rows("one", "two"))
    return path


def notes(path):
    return [json.loads(line).get("note") for line in path.read_text().split("\n") if line]


def test_a_row_that_lacks_only_its_newline_is_kept(path):
    path.write_bytes(path.read_bytes()[:-1])
    ResultFile(path).append(rows("three")[1:])
    assert notes(path) == [None, "one", "two", "three"]


@pytest.mark.parametrize("left", [1, 9, 60])
def test_a_row_that_was_cut_off_is_removed_with_a_warning(path, left):
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:left])
    with pytest.warns(UserWarning, match="the last row was cut off; it is removed"):
        file = ResultFile(path)
    assert len(file.rows) == 2
    file.append(rows("three")[1:])
    assert notes(path) == [None, "one", "two", "three"]


def test_half_a_character_is_no_obstacle(path):
    whole = path.read_bytes()
    path.write_bytes(whole + '{"schema": 1, "note": "é'.encode()[:-1])
    with pytest.warns(UserWarning, match="cut off"):
        ResultFile(path)
    assert path.read_bytes() == whole


def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{\n "some": "document"\n}')
    with pytest.raises(Exception, match=r"other\.json"):
        ResultFile(path)
    assert path.read_text() == '{\n "some": "document"\n}'


def test_a_row_may_hold_any_character(path):
    """Unicode has ends of lines that a file of rows does not have."""
    file = ResultFile(path)
    file.append(rows("a\u2028b\x85c")[1:])
    again = ResultFile(path)
    assert again.rows[-1]["note"] == "a\u2028b\x85c"
    again.amend([again.rows[0] | {"outlier": True}])
    assert len(ResultFile(path).rows) == 3
