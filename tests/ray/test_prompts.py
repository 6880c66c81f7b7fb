"""Several prompts a clip, metadata in prompts, and summaries, through whole runs with fake engines."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

import qwen_ray
from jobs.conformance.assets import x264
from jobs.conformance.recipe import render
from qwen_ray.errors import ConfigError
from qwen_ray.prompts import load
from tests.tables import rows

FAKE = ("caption.engine=fake", "speech=null", "decode.window_s=1")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos of three clips each, and a manifest with a title for both and an author for one."""
    folder = tmp_path_factory.mktemp("films")
    render(folder / "a.mp4", 90, video=x264())
    shutil.copy(folder / "a.mp4", folder / "b.mp4")
    _write_manifest(folder, {"a": "Heat", "b": "Dust"})
    return folder


def _write_manifest(folder: Path, titles: dict[str, str]) -> None:
    with (folder / "films.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(["uri", "title"])
        table.writerows([str(folder / f"{name}.mp4"), title] for name, title in titles.items())


def _job(films: Path, output: Path, *more: str, prompts: tuple[str, ...] = ()) -> qwen_ray.JobConfig:
    return qwen_ray.configure(str(films / "films.csv"), str(output), preset="tiny", set=[*FAKE, *more], prompts=prompts)


def _done_before(job: qwen_ray.JobConfig) -> int:
    """Videos for which another run finds nothing to do."""
    return qwen_ray.run(job).planned["done"]


def test_every_prompt_is_answered_about_every_clip(ray_address, films, tmp_path):
    asked = ("describe", "What is this, in five words?")
    assert qwen_ray.run(_job(films, tmp_path, prompts=asked)).exit_code == 0
    clips = rows(str(tmp_path), "clips")
    assert len(clips) == 6
    for clip in clips:
        first, second = clip["answers"]
        assert [first["prompt_name"], second["prompt_name"]] == ["describe", "prompt"]
        assert [first["prompt_hash"], second["prompt_hash"]] == [load(one).hash for one in asked]
        assert [first["num_prompt_tokens"], second["num_prompt_tokens"]] == [3, 6]  # the fake engine counts words
        assert (clip["caption"], clip["prompt_name"], clip["status"]) == (first["caption"], "describe", "ok")
        assert first["caption"].startswith("8 frames of")
    assert qwen_ray.verify(str(tmp_path)) == []


def test_captions_follow_the_metadata_that_a_prompt_shows(ray_address, films, tmp_path):
    job = _job(films, tmp_path, prompts=("The film is called {title}. What happens?",))
    qwen_ray.run(job)
    before = {row["clip_id"]: row for row in rows(str(tmp_path), "clips")}
    assert _done_before(job) == 2
    _write_manifest(films, {"a": "Heat", "b": "Dust and Rain"})
    report = qwen_ray.run(job)
    _write_manifest(films, {"a": "Heat", "b": "Dust"})
    assert (report.planned["stale_caption"], report.planned["done"]) == (1, 1)
    after = {row["clip_id"]: row for row in rows(str(tmp_path), "clips")}
    longer = [after[key]["num_prompt_tokens"] - before[key]["num_prompt_tokens"] for key in after]
    assert sorted(longer) == [0, 0, 0, 2, 2, 2]
    assert len({row["prompt_hash"] for row in after.values()}) == 1


def test_a_video_without_the_metadata_fails_alone_and_a_wrong_name_is_refused_at_once(ray_address, films, tmp_path):
    manifest = films / "films.jsonl"
    manifest.write_text(
        f'{{"uri": "{films}/a.mp4", "author": "Lee"}}\n{{"uri": "{films}/b.mp4"}}\n'  # the second has none
    )
    job = qwen_ray.configure(
        str(manifest), str(tmp_path), preset="tiny", set=FAKE, prompts=["By {author}?", "describe"]
    )
    report = qwen_ray.run(job)
    assert (report.videos, report.clips) == ({"ok": 1, "partial": 1}, {"ok": 3, "partial": 3})
    (video,) = (row for row in rows(str(tmp_path), "videos") if row["status"] == "partial")
    assert (video["error_type"], "author" in video["error_message"]) == ("no_metadata", True)
    clips = [row for row in rows(str(tmp_path), "clips") if row["status"] == "partial"]
    assert all(row["caption"] is None and row["answers"][1]["caption"] for row in clips)
    assert _done_before(job) == 2  # it will not change by itself, so it is not tried again
    with pytest.raises(ConfigError, match=r"\{autor\} names no column of the input; columns are author"):
        qwen_ray.run(qwen_ray.configure(str(manifest), str(tmp_path), preset="tiny", set=FAKE, prompts=["By {autor}?"]))


def test_a_videos_captions_are_merged_in_order_into_its_summary(ray_address, films, tmp_path):
    template = "About {title}:\n{captions}"
    job = _job(films, tmp_path, f"caption.summary={template}", prompts=("describe",))
    report = qwen_ray.run(job)
    assert (report.videos, report.exit_code) == ({"ok": 2}, 0)
    clips = sorted(rows(str(tmp_path), "clips"), key=lambda row: row["start_s"])
    for video in rows(str(tmp_path), "videos"):
        mine = [row for row in clips if row["video_id"] == video["video_id"]]
        lines = [f"{row['start_s']:.1f} to {row['end_s']:.1f}: {row['caption']}" for row in mine]
        title = {"a.mp4": "Heat", "b.mp4": "Dust"}[Path(video["uri"]).name]
        assert video["summary"] == "\n".join([f"About {title}:", *lines])  # the fake engine repeats a text
    assert qwen_ray.verify(str(tmp_path)) == []
    assert _done_before(job) == 2
