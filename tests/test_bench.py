"""The benchmarks run and report; what they measure is no business of a test."""

import json

import pytest

from vhajax import cli


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "decode", "generate", "compile"])
def test_each_benchmark_prints_rows(what, capsys):
    assert cli.main(["bench", what, "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    numbers = [value for row in rows for key, value in row.items() if key != "case"]
    assert rows
    assert all(value > 0 for value in numbers)
