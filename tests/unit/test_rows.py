"""Rows between stages: what goes into a table comes out of it, and lets go of its memory."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from qwen_ray.stages.rows import ROWS, Row, read_rows

FRAMES = np.arange(4 * 6 * 5 * 3, dtype=np.uint8).reshape(4, 6, 5, 3)


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("frames", [FRAMES, FRAMES[:, ::-1, ::2]], ids=["whole", "strided"])
def test_a_row_comes_out_as_it_went_in(frames):
    rows = [
        Row("clip", "v", "c", {"start_s": 1.5}, frames_THWC=frames),
        Row("speech", "v", "s", {}, pcm=np.array([1, -2, 32767], np.int16)),
        Row("video", "v", "v", {"error": None}),
    ]
    tables = [row.to_table() for row in rows]
    assert all(table.schema == ROWS for table in tables)
    for source in (pa.concat_tables(tables), pa.concat_tables(tables).combine_chunks()):
        clip, speech, video = read_rows(source)
        assert np.array_equal(clip.frames_THWC, frames)
        assert (clip.pcm, speech.frames_THWC, video.frames_THWC, video.pcm) == (None, None, None, None)
        assert speech.pcm.tolist() == [1, -2, 32767]
        assert [row.body for row in (clip, speech, video)] == [row.body for row in rows]


def test_a_table_that_is_gone_leaves_no_pixels_behind():
    before_mb = resident_mb()
    for _ in range(50):
        Row("clip", "v", "c", {}, frames_THWC=np.ones((4, 1000, 350, 3), np.uint8)).to_table()
    assert resident_mb() - before_mb < 60  # all of them are 200 MB
