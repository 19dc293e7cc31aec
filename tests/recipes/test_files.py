import json

import pytest

from generator.task import DataError
from recipes.files import read_rows

ROW = {"problem": "What is $1 + 1$?", "answer": "2"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_rows_are_read_by_the_name_of_the_file_and_know_where_they_stand(tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_bytes(b'\xef\xbb\xbfproblem,answer\r\nWhat is $1 + 1$?,2\r\n"two\nlines",3\r\n')
    elif path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([ROW, {"problem": "two\nlines", "answer": "3"}]), path)
    else:
        rows = [json.dumps(ROW), "", json.dumps({"problem": "two\nlines", "answer": "3"})]
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    (first, where), (second, then) = read_rows(path)
    assert first == ROW
    assert second == {"problem": "two\nlines", "answer": "3"}
    places = {".csv": (":2", ":4"), ".parquet": (" row 1", " row 2")}.get(path.suffix, (":1", ":3"))
    assert (where, then) == tuple(f"{path}{place}" for place in places)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": ', r"rows\.jsonl:2: the line is not JSON"),
        ("rows.jsonl", b"[1]", r"rows\.jsonl:1: the line is a JSON list, not an object"),
        ("rows.jsonl", b'{"a": ' + b"1" * 5000 + b"}", r":1: the line cannot be read: Exceeds the limit"),
        ("rows.jsonl", b"[" * 100_000, r":1: the line is nested too deeply"),
        ("rows.jsonl", b"\xff\xfe\x00", "cannot be read"),
        ("rows.jsonl", b"\n \n", "is empty"),
        ("rows.csv", b"", "is empty"),
        ("rows.csv", b"a,b\n", "is empty"),
        ("rows.csv", b"a,b\n1,2\n3\n", r"rows\.csv:3: the line has 1 values for 2 columns"),
        ("rows.csv", b"a,b\n1,2,3\n", r"rows\.csv:2: the line has 3 values for 2 columns"),
        ("rows.csv", b"a,a\n1,2\n", r"rows\.csv:1: the first line must name each column, once"),
        ("rows.csv", b'a,b\n"1,2\n', r"the line is not CSV"),
        ("rows.parquet", b"PAR1 but not really", "the file is not Parquet"),
        ("rows.parquet", b"", "the file is not Parquet"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_the_cause(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(path)


def test_a_missing_file_and_a_folder_are_named_with_the_key_that_names_them(tmp_path):
    with pytest.raises(DataError, match=r"data\.eval_path: there is no file .*nothing\.csv"):
        read_rows(tmp_path / "nothing.csv", "data.eval_path")
    with pytest.raises(DataError, match=r"data\.path: .* is a folder"):
        read_rows(tmp_path)
