"""One clip under several prompts, from Python."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

import qwen_ray
from qwen_ray.api import SAMPLES
from qwen_ray.errors import ConfigError, InputError

TRUTH = json.loads((SAMPLES / "truth.json").read_text())


@pytest.fixture(scope="module")
def captioner():
    with qwen_ray.Captioner(qwen_ray.configure("", "", preset="tiny")) as captioner:
        yield captioner


def test_a_clip_is_described_under_each_prompt(captioner):
    file = str(SAMPLES / "two-scenes.mp4")
    for clip in TRUTH["two-scenes.mp4"]["clips"]:
        first, second = captioner.ask(file, clip["start_s"], clip["end_s"], ["describe", "Describe this video."])
        assert (first["prompt_name"], first["caption"]) == ("describe", clip["caption"])
        assert (second["prompt_name"], second["finish_reason"], second["flags"]) == ("prompt", "stop", [])


def test_the_model_is_in_a_process_of_its_own_which_may_die(captioner):
    def ask():
        return captioner.ask(str(SAMPLES / "portrait.mp4"), 0, 3)[0]

    first = ask()
    (engine,) = engines_of(os.getpid())
    os.kill(engine, signal.SIGKILL)
    assert ask() == first
    (other,) = engines_of(os.getpid())
    assert other != engine


def engines_of(parent):
    """The living engine processes that this process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = (folder / "stat").read_text().rpartition(") ")[2].split()
            if int(after_name[1]) == parent and b"qwen_ray.engines.child" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_without_prompts_those_of_the_job_are_asked_and_metadata_fills_them(captioner):
    file = str(SAMPLES / "portrait.mp4")
    assert [answer["prompt_name"] for answer in captioner.ask(file, 0, 3)] == ["describe"]
    (known,) = captioner.ask(file, 0, 3, ["The title is {title}."], {"title": "Heat"})
    (unknown,) = captioner.ask(file, 0, 3, ["The title is {title}."])
    assert (known["error_type"], unknown["error_type"]) == (None, "no_metadata")


def test_what_cannot_be_asked_is_refused(captioner, tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(InputError):
        captioner.ask(str(tmp_path / "text.mp4"), 0, 3)
    with pytest.raises(ConfigError, match="describ"):
        captioner.ask(str(SAMPLES / "portrait.mp4"), 0, 3, ["describ"])
    with pytest.raises(ConfigError, match="caption = null"):
        qwen_ray.Captioner(qwen_ray.configure("", "", preset="tiny", set=["caption=null"]))
