"""A file that hangs, crashes or swells costs its own row; the others of its table come out whole."""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.conformance import bases
from jobs.conformance.mutations import structure
from qwen_ray.config import DecodeConfig, JobConfig, SpeechConfig
from qwen_ray.io.storage import canonical_uri
from qwen_ray.stages.decode import TODO, DecodeStage
from qwen_ray.stages.rows import read_rows

LARGE = {"window_s": 0.5, "num_frames": 4, "min_pixels": 900_000, "max_pixels": 1_000_000}
"""Clips that do not fit into the socket, so that the process stops in the middle of one."""
SMALL = {"window_s": 0.5, "num_frames": 4, "max_pixels": 20_000}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return bases.render(tmp_path_factory.mktemp("bases"))


def table(folder, files, *, want_speech=False):
    """The files as rows for the stage; the video's id is its name."""
    rows = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        wants = {"want_caption": True, "want_speech": want_speech, "version": "", "metadata": "{}"}
        nothing = {"done_clips": [], "done_chunks": []}
        rows.append({"video_id": name, "uri": canonical_uri(str(folder / name))} | wants | nothing)
    return pa.Table.from_pylist(rows, schema=TODO)


def stage_of(**decode):
    return DecodeStage(JobConfig(decode=DecodeConfig(**decode), speech=SpeechConfig()))


def run(folder, files, on_row=lambda stage, row: None, *, want_speech=False, **decode):
    """All rows of the files, by video; `on_row` sees each as it comes."""
    stage, found = stage_of(**decode), {name: [] for name in files}
    try:
        for one in stage(table(folder, files, want_speech=want_speech)):
            (row,) = read_rows(one)
            found[row.video_id].append(row)
            on_row(stage, row)
    finally:
        stage.close()
    return found


def check_whole(rows):
    """One `video` row at the end, and a sound row for each of its clips."""
    assert [row.kind for row in rows] == ["clip"] * (len(rows) - 1) + ["video"]
    body = rows[-1].body
    assert (body["error"], body["damaged"]) == (None, False)
    assert [row.item_id for row in rows[:-1]] == [clip_id for clip_id, _, _ in body["clips"]]
    assert all(row.body["status"] == "ok" and row.frames_THWC is not None for row in rows[:-1])
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("number", "error_type"),
    [
        (signal.SIGSTOP, "decode_timeout"),
        (signal.SIGSEGV, "decode_crashed"),
        (signal.SIGABRT, "decode_crashed"),
        (signal.SIGKILL, "decode_memory"),
    ],
)
def test_what_ends_the_decoder_costs_one_file(sound, tmp_path, number, error_type):
    def strike(stage, row):
        if (row.video_id, row.kind) == ("b.mkv", "clip") and row.body["clip_index"] == 0:
            os.kill(stage.decoder_pid, number)

    files = {"a.mp4": sound["h264.mp4"], "b.mkv": sound["h264.mkv"], "c.webm": sound["vp9.webm"]}
    found = run(tmp_path, files, strike, **LARGE, deadline_s=2)
    check_whole(found["a.mp4"])
    check_whole(found["c.webm"])
    *clips, video = found["b.mkv"]
    assert video.kind == "video"
    assert video.body["error"][0] == error_type
    assert [clip.body["status"] for clip in clips] == ["ok", "failed", "failed"]
    assert {clip.body["error_type"] for clip in clips[1:]} == {error_type}
    assert [clip.item_id for clip in clips] == [clip_id for clip_id, _, _ in video.body["clips"]]


BOMB = """
import resource, sys
from pathlib import Path
from tests.unit.test_decode_stage import run
files = {"a.mp4": Path(sys.argv[1]).read_bytes(), "bomb.gif": Path(sys.argv[2]).read_bytes()}
files["c.mp4"] = files["a.mp4"]
for name, rows in run(Path(sys.argv[3]), files, window_s=0.5, num_frames=4, max_pixels=20_000, memory_gb=0.5).items():
    failed = rows[-1].body["error"] or [rows[0].body.get("error_type"), ""]
    print(name, len([row for row in rows if row.kind == "video"]), failed[0])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20)
"""


def test_a_decompression_bomb_stays_within_its_bound(sound, tmp_path):
    gif = bytearray(sound["anim.gif"])
    gif[6:10] = struct.pack("<HH", 16000, 16000)  # 1 GB a picture; FFmpeg itself refuses 16384 x 16384
    (tmp_path / "bomb.gif").write_bytes(gif)
    (tmp_path / "a.mp4").write_bytes(sound["h264.mp4"])
    (tmp_path / "in").mkdir()
    arguments = [str(tmp_path / name) for name in ("a.mp4", "bomb.gif", "in")]
    done = subprocess.run([sys.executable, "-c", BOMB, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *files, peak_gb = done.stdout.splitlines()
    assert files == ["a.mp4 1 None", "bomb.gif 1 decode_memory", "c.mp4 1 None"]
    assert float(peak_gb) < 0.6


def boxes(data, kind):
    """The boxes of a kind."""
    return [e for e in structure(data).elements if data[e.start + 4 : e.body] == kind]


def with_body(data, box, body):
    """An MP4 whose box has another body; the boxes around it grow along."""
    out = bytearray(data)
    for parent in box.parents:
        size = parent.end - parent.start + len(body) - (box.end - box.body)
        out[parent.start : parent.start + 4] = struct.pack(">I", size)
    out[box.start : box.end] = struct.pack(">I", 8 + len(body)) + data[box.start + 4 : box.body] + body
    return bytes(out)


def lying_index(data, count, size, offset):
    """An MP4 whose picture has `count` samples of `size` bytes, each a chunk at `offset`, as far as the table tells."""
    data = with_body(data, boxes(data, b"stsz")[0], struct.pack(">III", 0, size, count))
    data = with_body(data, boxes(data, b"stsc")[0], struct.pack(">IIIII", 0, 1, 1, 1, 1))
    chunks = min(count, 3000)
    data = with_body(data, boxes(data, b"stco")[0], struct.pack(">II", 0, chunks) + struct.pack(">I", offset) * chunks)
    return with_body(data, boxes(data, b"stts")[0], struct.pack(">IIII", 0, 1, count, 512))


@pytest.mark.parametrize(
    ("count", "damaged"),
    [(2**31 - 1, False), (2**32 - 1, False), (3000, True)],  # FFmpeg drops the first two's picture, the sound is whole
)
def test_a_lying_index_makes_no_endless_work(sound, tmp_path, count, damaged):
    (media,) = boxes(sound["h264.mp4"], b"mdat")
    data = lying_index(sound["h264.mp4"], count, media.end - media.body, media.body)
    files = {"a.mp4": sound["h264.mp4"], "lying.mp4": data, "c.mp4": sound["h264.mp4"]}
    found = run(tmp_path, files, **SMALL, deadline_s=20, file_deadline_s=20, memory_gb=1)
    check_whole(found["a.mp4"])
    check_whole(found["c.mp4"])
    *clips, video = found["lying.mp4"]
    assert video.kind == "video"
    assert (video.body["damaged"], video.body["error"]) == (damaged, None)
    assert video.body["info"]["num_frames"] < 300
    assert len(clips) < 200


def ffmpeg(*arguments):
    subprocess.run([bases.find_ffmpeg(), "-v", "error", "-y", *map(str, arguments)], check=True)


def test_years_between_two_frames_make_few_clips(sound, tmp_path):
    leap = "setpts='(N+if(gte(N,6),315360000,0))/10/TB'"
    (tmp_path / "plain.mp4").write_bytes(sound["h264.mp4"])
    target = tmp_path / "leap.mkv"
    ffmpeg("-i", tmp_path / "plain.mp4", "-an", "-vf", leap, "-fps_mode", "vfr", "-c:v", "libx264", target)
    found = run(tmp_path, {"leap.mkv": target.read_bytes()}, **SMALL)
    *clips, video = found["leap.mkv"]
    year_s = 31_536_000
    assert video.body["info"]["duration_s"] == pytest.approx(year_s + 1.2, abs=0.2)
    lengths_s = [row.body["end_s"] - row.body["start_s"] for row in clips]
    assert lengths_s == pytest.approx([0.5, 0.5, year_s - 0.5, 0.5, 0.2])
    assert [row.body["num_frames_decoded"] for row in clips] == [4, 1, 1, 4, 2]


def test_sound_before_a_hole_of_weeks_is_kept(tmp_path):
    spoken = Path(__file__).parents[1] / "assets" / "speech.ogg"
    leap = "asetpts='PTS+if(gte(T,5.5),3000000/TB,0)'"  # between its two sentences
    target = tmp_path / "leap.mka"
    ffmpeg("-i", spoken, "-af", leap, "-c:a", "pcm_s16le", target)
    found = run(tmp_path, {"leap.mka": target.read_bytes()}, want_speech=True, **SMALL, deadline_s=10)
    chunk, video = found["leap.mka"]
    assert (chunk.kind, video.kind) == ("speech", "video")
    assert chunk.body["start_s"] == pytest.approx(0.5, abs=0.3)
    assert chunk.body["end_s"] == pytest.approx(4.9, abs=0.4)
    assert video.body["audio_error"][0] == "unreadable"
    assert "holes of more than 24 h after 5.5 s" in video.body["audio_error"][1]
