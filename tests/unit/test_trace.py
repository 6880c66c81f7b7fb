"""The diary of an engine."""

import json

from hypothesis import given
from hypothesis import strategies as st

from qwen_ray.engines.batching import Batcher
from qwen_ray.engines.trace import covered


def test_batches_are_written_down_where_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("QWEN_RAY_TRACE", str(tmp_path))
    batcher = Batcher(lambda requests: requests, str, batch_size=4, name="doubler")
    assert [batcher.submit(k).result() for k in range(3)] == [0, 1, 2]
    batcher.close()
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name.startswith("doubler-")
    assert [line["event"] for line in lines] == ["work"] * 3
    assert all(line["began"] <= line["ended"] for line in lines)


def test_nothing_is_written_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("QWEN_RAY_TRACE", raising=False)
    monkeypatch.chdir(tmp_path)
    batcher = Batcher(lambda requests: requests, str, batch_size=4, name="doubler")
    batcher.submit(1).result()
    batcher.close()
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple)))
def test_the_union_of_spans_counts_every_moment_once(spans):
    assert covered(spans) == len({moment for start, end in spans for moment in range(start, end)})
