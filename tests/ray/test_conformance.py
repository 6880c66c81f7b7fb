"""What the tables say of every file of the conformance suite, after one run over all of them."""

import pytest

import qwen_ray
from jobs.conformance.assets import ASSETS
from qwen_ray.io.storage import file_name

NAMES = list(ASSETS)


@pytest.fixture(scope="module")
def videos(ray_address, find, tmp_path_factory):
    """Rows of the `videos` table by file name."""
    folder, out = tmp_path_factory.mktemp("suite"), tmp_path_factory.mktemp("out")
    for name in NAMES:
        (folder / name).symlink_to(find(name))
    settings = ["caption.engine=fake", "speech.engine=fake", "decode.window_s=3600", "decode.max_pixels=76800"]
    job = qwen_ray.configure(str(folder / "*"), str(out), set=settings)
    qwen_ray.run(job)
    rows = qwen_ray.read_table(str(out), "videos").to_pylist()
    assert len(rows) == len(NAMES)
    return {file_name(row["uri"]): row for row in rows}


def test_every_file_ends_in_one_row(videos):
    assert sorted(videos) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_row_says_what_is_true(videos, name):
    asset, row = ASSETS[name], videos[name]
    assert (row["status"], row["error_type"]) == (asset.status, asset.error_type)
    if asset.status == "failed":
        assert row["caption_status"] == "failed"
    if not asset.size[0] or (asset.status == "failed" and not asset.damaged):
        return
    assert (row["width"], row["height"], row["sar"]) == (*asset.size, asset.sar)
    assert (row["rotation_deg"], row["codec"]) == (asset.rotation_deg, asset.codec)
    assert row["has_audio"] == (asset.sound is not None)
    if asset.start_offset_s is not None:
        assert row["start_offset_s"] == pytest.approx(asset.start_offset_s, abs=0.002)


@pytest.mark.parametrize("name", [name for name, asset in ASSETS.items() if asset.good])
def test_a_good_files_facts(videos, name):
    asset, row = ASSETS[name], videos[name]
    shown_s = asset.shown_s()
    assert row["num_frames"] == len(shown_s)
    assert row["caption_status"] == "ok"
    assert row["speech_status"] == ("no_audio" if asset.sound is None else row["speech_status"])
    assert row["duration_s"] >= shown_s[-1] - asset.slack_s
    if len(shown_s) > 1:
        gap_s = shown_s[-1] / (len(shown_s) - 1)
        sound_s = asset.sound.starts_s + asset.sound.seconds if asset.sound else 0.0
        expected_s = max(shown_s[-1] + gap_s, sound_s)
        assert row["duration_s"] == pytest.approx(expected_s, abs=asset.slack_s + gap_s + 0.1)
