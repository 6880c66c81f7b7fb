import dataclasses

import pytest

from qwen_ray.config import (
    PRESETS,
    JobConfig,
    fingerprint,
    from_dict,
    load_file,
    override,
    preset,
    set_paths,
    to_dict,
    to_yaml,
)
from qwen_ray.errors import ConfigError
from qwen_ray.prompts import Prompt


def test_a_preset_survives_being_written_and_read():
    assert from_dict(to_dict(preset("tiny"))) == preset("tiny")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints_as_a_file_that_gives_it_back(name, tmp_path):
    (tmp_path / "job.yaml").write_text(to_yaml(preset(name)))
    assert from_dict(load_file(str(tmp_path / "job.yaml"))) == preset(name)
    assert preset(name).preset == name


def test_set_overrides_one_value_and_no_other():
    job = set_paths(preset("tiny"), ["caption.temperature=0.7", "speech=null", "decode.num_frames=4"])
    assert job.caption is not None
    assert (job.caption.temperature, job.speech, job.decode.num_frames) == (0.7, None, 4)
    assert job.caption.model == "builtin:tiny-qwen2.5-vl"


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("caption.model=*all*: # x", "*all*: # x"),
        ("caption.model=[x", "[x"),
        ("speech.language=no", "no"),
        ("speech.language=", ""),
    ],
)
def test_text_is_taken_as_it_is_typed(assignment, value):
    component, _, name = assignment.partition("=")[0].partition(".")
    assert getattr(getattr(set_paths(preset("tiny"), [assignment]), component), name) == value


def test_a_component_that_was_off_is_switched_on_by_setting_one_of_its_values():
    off = set_paths(preset("tiny"), ["speech=null"])
    assert set_paths(off, ["speech.language=de"]).speech.language == "de"


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("caption.temprature=1", ["caption.temprature", "'temperature'"]),
        ("captions.temperature=1", ["captions", "'caption'"]),
        ("decode.num_frames=1", ["decode.num_frames = 1", "2 or more"]),
        ("decode.num_frames=many", ["decode.num_frames", "'many'"]),
        ("decode.max_pixels=100", ["decode.max_pixels = 100", "min_pixels"]),
        ("max_failed_fraction=2", ["max_failed_fraction = 2", "0 to 1"]),
        ("caption.engine=gpt", ["caption.engine", "'gpt'", "qwen_vl"]),
        ("limit", ["'limit'", "path=value"]),
        ("decode=[x", ["decode=[x"]),
        ("decode.window_s=.inf", ["decode.window_s = inf"]),
        ("speech.language=English", ["'English'", "code"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(assignment, words):
    with pytest.raises(ConfigError) as raised:
        set_paths(preset("tiny"), [assignment])
    for word in words:
        assert word in str(raised.value)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        preset("tyni")


def test_a_run_must_ask_for_something():
    with pytest.raises(ConfigError, match="at least one"):
        override(JobConfig(), {"caption": None, "speech": None})


def test_fingerprints_follow_content_and_ignore_speed():
    caption = preset("tiny").caption
    base = fingerprint(caption, "revision-1")
    assert fingerprint(dataclasses.replace(caption, batch_size=99, num_gpus=0.5, replicas=3), "revision-1") == base
    changed = {
        fingerprint(dataclasses.replace(caption, prompts=(Prompt(name="x", text="What happens?"),)), "revision-1"),
        fingerprint(dataclasses.replace(caption, max_new_tokens=7), "revision-1"),
        fingerprint(caption, "revision-2"),
    }
    assert base not in changed
    assert len(changed) == 3
