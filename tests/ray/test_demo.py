"""What `make demo` runs: the captions are the renderer's, the words are the script's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import srt

from qwen_ray.api import SAMPLES
from qwen_ray.io.storage import file_name
from tests.tables import rows

TRUTH = json.loads((SAMPLES / "truth.json").read_text())


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "qwen_ray", "demo", "--out", str(folder)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def _by_video(folder: Path, table: str) -> dict[str, list[dict]]:
    names = {row["video_id"]: file_name(row["uri"]) for row in rows(str(folder / "tables"), "videos")}
    grouped: dict[str, list[dict]] = {name: [] for name in names.values()}
    for row in rows(str(folder / "tables"), table):
        grouped[names[row["video_id"]]].append(row)
    return grouped


def test_every_caption_is_the_renderers(demo):
    clips = _by_video(demo[0], "clips")
    assert set(clips) == set(TRUTH)
    for name, truth in TRUTH.items():
        found = sorted(clips[name], key=lambda clip: clip["start_s"])
        assert [clip["caption"] for clip in found] == [clip["caption"] for clip in truth["clips"]], name
        for clip, true in zip(found, truth["clips"], strict=True):
            assert clip["start_s"] == pytest.approx(true["start_s"], abs=0.05)
            assert clip["end_s"] == pytest.approx(true["end_s"], abs=0.05)


def test_every_word_is_the_scripts(demo):
    segments = _by_video(demo[0], "segments")
    for name, truth in TRUTH.items():
        spoken = sorted(segments[name], key=lambda segment: segment["start_s"])
        assert _words(" ".join(segment["text"] for segment in spoken)) == _words(truth["script"]), name
        words = [word for segment in spoken for word in segment["words"]]
        assert [w for word in words for w in _words(word["word"])] == _words(truth["script"]), name
        starts = [word["start_s"] for word in words]
        assert starts == sorted(starts)


def test_every_sentence_is_where_it_was_spoken(demo):
    segments = _by_video(demo[0], "segments")
    for name, truth in TRUTH.items():
        words = [word for segment in segments[name] for word in segment["words"]]
        for sentence in truth["speech"]:
            inside = [word for word in words if sentence["start_s"] - 0.5 <= word["start_s"] < sentence["end_s"] + 0.1]
            assert [w for word in inside for w in _words(word["word"])] == _words(sentence["text"]), name


def test_subtitles_say_the_same(demo):
    files = {path.stem: path for path in (demo[0] / "subtitles").glob("*.srt")}
    assert set(files) == {Path(name).stem for name in TRUTH}
    for name, truth in TRUTH.items():
        shown = srt.parse(files[Path(name).stem].read_text(encoding="utf-8"))
        assert _words(" ".join(one.content for one in shown)) == _words(truth["script"])


def test_what_a_person_sees_names_captions_and_files(demo):
    folder, printed = demo
    flat = re.sub(r"[│┃\s]+", " ", printed)
    assert "caption" in flat
    assert "part-" in flat
    for path in (folder / "subtitles").glob("*.srt"):
        assert str(path) in re.sub(r"\s+", " ", printed)
