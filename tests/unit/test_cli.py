"""What a user meets on the command line before anything starts."""

import json
import subprocess
import sys

import pytest
import yaml

from jobs.conformance.assets import AAC, x264
from jobs.conformance.recipe import render


def _cli(*arguments, cwd=None):
    command = [sys.executable, "-m", "qwen_ray", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    render(folder / "one.mp4", num_frames=60, video=x264(), audio=AAC)
    (folder / "empty").mkdir()
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nowhere", "out", "--preset", "tiny"), ["nowhere", "nothing there"]),
        (("run", "empty", "out", "--preset", "tiny"), ["empty", "no videos"]),
        (("run", "one.mp4", "out"), ["--preset", "tiny"]),
        (("run", "one.mp4", "out", "--preset", "tyni"), ["'tyni'", "did you mean 'tiny'"]),
        (("run", "one.mp4", "out", "--preset", "tiny", "--set", "caption.modle=x"), ["caption.modle", "'model'"]),
        (("run", "one.mp4", "out", "--preset", "tiny", "--set", "caption.model=./x"), ["./x", "no such folder"]),
        (("run", "one.mp4", "out", "--preset", "tiny", "--config", "none.yaml"), ["none.yaml", "No such file"]),
        (("run", "one.mp4", "file/out", "--preset", "tiny"), ["file/out"]),
        (("run", "one.mp4", "ftp://host/out", "--preset", "tiny"), ["ftp://", "s3://"]),
        (("run", "one.mp4", "out", "--preset", "tiny", "--address", "127.0.0.1:1"), ["127.0.0.1:1", "no Ray cluster"]),
        (("run", "one.mp4"), ["OUTPUT"]),
        (("status", "nowhere"), ["nowhere", "no tables"]),
        (("retry", "empty"), ["empty"]),
        (("frames", "one.mp4", "--start", "5", "--end", "4", "--out", "x"), ["5", "4"]),
        (("frames", "none.mp4", "--start", "0", "--end", "4", "--out", "x"), ["none.mp4", "no such file"]),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(folder, arguments, words):
    done = _cli(*arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in " ".join(done.stderr.split()), done.stderr


def test_probe_tells_facts_of_a_file(folder):
    info = json.loads(_cli("probe", folder / "one.mp4", "--json").stdout)
    assert (info["num_frames"], info["width"], info["height"], info["has_audio"]) == (60, 320, 240, True)
    assert info["duration_s"] == pytest.approx(2.0, abs=0.05)
    assert "num_frames" in _cli("probe", folder / "one.mp4").stdout


def test_probing_what_is_no_video_is_an_error(folder):
    done = _cli("probe", folder / "file")
    assert (done.returncode, "empty" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_plan_and_dry_run_say_the_same_and_write_nothing(folder, tmp_path):
    arguments = (folder / "one.mp4", tmp_path / "out", "--preset", "tiny", "--set", "caption.engine=fake", "--json")
    planned = json.loads(_cli("plan", *arguments).stdout)
    assert planned == json.loads(_cli("run", "--dry-run", *arguments).stdout)
    assert (planned["num_todo"], planned["planned"]["new"]) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_whole_configuration_is_printed_without_input_or_model():
    shown = yaml.safe_load(_cli("plan", "--preset", "qwen3-vl-8b", "--prompt", "What is it?", "--show-config").stdout)
    assert shown["caption"]["model"] == "Qwen/Qwen3-VL-8B-Instruct"
    assert shown["caption"]["prompts"] == [{"name": "prompt", "text": "What is it?", "system": "", "script": ""}]
    assert (shown["decode"]["size_multiple"], shown["speech"]["model"]) == (32, "large-v3-turbo")
