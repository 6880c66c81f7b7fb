"""Rows in any order, twice, saved and loaded again: the same videos come out."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_ray.assemble import Assembler
from qwen_ray.io.ledger import Fingerprints, Todo
from qwen_ray.io.source import Source
from qwen_ray.records import Identity, merge
from qwen_ray.schema import span_id
from qwen_ray.stages.rows import Row

IDENTITY = Identity("run-1", Fingerprints(decode="d", caption="c", speech="s"))
INFO = {
    "duration_s": 30.0,
    "width": 320,
    "height": 240,
    "rotation_deg": 0,
    "sar": "1:1",
    "codec": "h264",
    "avg_fps": 30.0,
    "num_frames": 900,
    "tracks": [],
    "has_video": True,
    "has_audio": True,
    "audio_offset_s": 0.0,
    "start_offset_s": 0.0,
}


def _todo(name, part=None, **more):
    wants = {"want_caption": True, "want_speech": True, "keep_caption": False, "keep_speech": False, "attempts": 0}
    source = Source(name, f"file:///{name}", more.pop("version", "v1"), 10)
    return Todo(source=source, reason="new", part=part, **wants | more)


def _clip(name, index, **body):
    start_s, end_s = 12.0 * index, 12.0 * index + 6.0
    times = {"clip_index": index, "start_s": start_s, "end_s": end_s, "status": "ok"}
    return Row("clip", name, span_id("clip", name, start_s, end_s), times | {"caption": f"{name} {index}"} | body)


def _speech(name, start_s, end_s, segments=None, **body):
    found = [{"text": f"said at {start_s}", "start_s": start_s, "end_s": end_s, "language": "en", "avg_logprob": -0.1}]
    filled = [{"no_speech_prob": 0.0, "words": [], "flags": []} | one for one in segments or found]
    times = {"start_s": start_s, "end_s": end_s, "segments": filled}
    return Row("speech", name, span_id("chunk", name, start_s, end_s), times | body)


def _summary(name, clips=(), chunks=(), **body):
    listed = {
        "clips": [(row.item_id, row.body["start_s"], row.body["end_s"]) for row in clips],
        "chunks": [(row.item_id, row.body["start_s"], row.body["end_s"]) for row in chunks],
    }
    facts = {"info": INFO, "error": None, "audio_error": None, "damaged": False}
    return Row("video", name, name, listed | facts | body)


def _rows_of(name):
    clips, chunks = [_clip(name, 0), _clip(name, 1)], [_speech(name, 1.0, 4.0), _speech(name, 8.0, 9.0)]
    return [*clips, *chunks, _summary(name, clips, chunks)]


def _outcome(finished):
    timeless = [one.video | {"finished_at": None} for one in finished]
    return sorted(timeless, key=lambda row: row["video_id"]), sorted(
        (clip["clip_id"], clip["caption"]) for one in finished for clip in one.clips
    )


def _assembled(rows, names=("a", "b", "c")):
    assembler = Assembler([_todo(name) for name in names], IDENTITY)
    for row in rows:
        assembler.add(row)
    return assembler


@given(st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(rng: random.Random):
    rows = [row for name in "abc" for row in _rows_of(name)]
    shuffled = rows + rng.sample(rows, 6)
    rng.shuffle(shuffled)
    assert _outcome(_assembled(shuffled).take()) == _outcome(_assembled(rows).take())


@given(st.randoms(use_true_random=False), st.integers(0, 15))
def test_rows_saved_halfway_are_as_good_as_rows_that_came(rng: random.Random, cut: int):
    rows = [row for name in "abc" for row in _rows_of(name)]
    rng.shuffle(rows)
    before = _assembled(rows[:cut])
    after = Assembler([_todo(name) for name in "abc"], IDENTITY)
    saved = before.save()
    assert after.load(saved) == cut if saved else cut == 0
    for row in rows:
        after.add(row)
    assert _outcome(after.take()) == _outcome(_assembled(rows).take())


def test_saved_rows_of_another_version_or_recipe_are_not_taken():
    saved = _assembled(_rows_of("a")).save()
    other_version = Assembler([_todo("a", version="v2")], IDENTITY)
    other_recipe = Assembler([_todo("a")], Identity("run-2", Fingerprints(decode="d", caption="other", speech="s")))
    assert (other_version.load(saved), other_recipe.load(saved)) == (0, 0)


def test_what_is_done_of_an_open_video_is_known():
    rows = _rows_of("a")
    assembler = _assembled([rows[1], rows[3]], names="a")
    assert assembler.done_items("a") == ([1], [rows[3].item_id])


def test_videos_of_one_part_are_given_together():
    assembler = Assembler([_todo("a", part="part-1"), _todo("b", part="part-1"), _todo("c")], IDENTITY)
    for row in (*_rows_of("a"), *_rows_of("c")):
        assembler.add(row)
    assert [one.video["video_id"] for one in assembler.take()] == ["c"]
    for row in _rows_of("b"):
        assembler.add(row)
    assert sorted(one.video["video_id"] for one in assembler.take()) == ["a", "b"]


def test_what_never_came_ends_as_lost():
    rows = _rows_of("a")
    assembler = _assembled([row for row in rows if row is not rows[1]] + _rows_of("b")[:2], names="ab")
    assembler.give_up()
    a, b = sorted(assembler.take(), key=lambda one: one.video["video_id"])
    assert [clip["status"] for clip in a.clips] == ["ok", "failed"]
    assert (a.clips[1]["error_type"], a.clips[1]["start_s"], a.clips[1]["end_s"]) == ("lost", 12.0, 18.0)
    assert (a.video["status"], a.video["caption_status"], a.video["error_type"]) == ("partial", "partial", "lost")
    assert (b.video["status"], b.video["error_type"], b.clips) == ("failed", "lost", [])


NO_VIDEO, NO_AUDIO = INFO | {"has_video": False}, INFO | {"has_audio": False}
FAILED = {"status": "failed", "error_type": "engine_crashed", "error_message": "no"}


@pytest.mark.parametrize(
    ("clips", "chunks", "facts", "expected"),
    [
        ([_clip("a", 0)], [_speech("a", 1, 2)], {}, ("ok", "ok", "ok")),
        ([_clip("a", 0)], [], {}, ("ok", "ok", "no_speech")),
        ([_clip("a", 0)], [], {"info": NO_AUDIO}, ("ok", "ok", "no_audio")),
        ([], [_speech("a", 1, 2)], {"info": NO_VIDEO}, ("ok", "no_video", "ok")),
        ([], [], {"info": NO_VIDEO}, ("ok", "no_video", "no_speech")),
        ([], [], {"info": None, "error": ("unreadable", "no")}, ("failed", "failed", "failed")),
        ([_clip("a", 0, **FAILED)], [_speech("a", 1, 2)], {}, ("partial", "failed", "ok")),
        ([_clip("a", 0, **FAILED), _clip("a", 1)], [], {}, ("partial", "partial", "no_speech")),
        ([_clip("a", 0)], [_speech("a", 1, 2, **FAILED)], {}, ("partial", "ok", "failed")),
        ([_clip("a", 0, **FAILED)], [_speech("a", 1, 2, **FAILED)], {}, ("failed", "failed", "failed")),
        ([_clip("a", 0)], [], {"audio_error": ("no_samples", "no")}, ("partial", "ok", "failed")),
        ([_clip("a", 0)], [_speech("a", 1, 2)], {"damaged": True}, ("partial", "ok", "ok")),
        ([_clip("a", 0)], [], {"error": ("decode_timeout", "no")}, ("partial", "ok", "failed")),
        ([_clip("a", 0)], [_speech("a", 1, 2)], {"error": ("decode_timeout", "no")}, ("partial", "ok", "partial")),
        ([], [_speech("a", 1, 2, **FAILED)], {"info": NO_VIDEO}, ("failed", "no_video", "failed")),
    ],
)
def test_statuses(clips, chunks, facts, expected):
    assembler = _assembled([*clips, *chunks, _summary("a", clips, chunks, **facts)], names="a")
    (one,) = assembler.take()
    assert (one.video["status"], one.video["caption_status"], one.video["speech_status"]) == expected
    assert (one.video["num_clips"], one.video["num_segments"]) == (len(one.clips), len(one.segments))


def test_times_of_speech_stay_on_the_videos_axis():
    early = {"text": "early", "start_s": -2.0, "end_s": -1.0, "language": "en", "avg_logprob": 0.0}
    across = early | {"text": "across", "start_s": -0.5, "end_s": 1.0}
    late = early | {"text": "late", "start_s": 29.0, "end_s": 33.0}
    word = {"word": "late", "start_s": 31.0, "end_s": 33.0, "probability": 1.0, "aligned": True}
    chunk = _speech("a", -2.0, 33.0, [early, early, across, late | {"words": [word]}])
    (one,) = _assembled([chunk, _summary("a", [], [chunk], info=NO_VIDEO)], names="a").take()
    spans = [(row["start_s"], row["end_s"]) for row in one.segments]
    assert spans == [(0.0, 0.0), (0.0, 0.0), (0.0, 1.0), (29.0, 30.0)]
    assert [row["flags"] for row in one.segments] == [["before_video"]] * 3 + [[]]
    assert (one.segments[3]["words"][0]["start_s"], one.segments[3]["words"][0]["end_s"]) == (30.0, 30.0)
    assert len({row["segment_id"] for row in one.segments}) == 4
    assert one.video["transcript"] == "early early across late"


def test_an_error_that_may_pass_decides_whether_the_video_is_tried_again():
    broken = _clip("a", 0, **FAILED)  # engine_crashed, which may pass
    rows = [broken, _summary("a", [broken], [], audio_error=("no_samples", "never will"))]
    (one,) = _assembled(rows, names="a").take()
    assert one.video["error_type"] == "engine_crashed"


def test_rows_that_the_summary_does_not_list_are_left_out():
    stale, kept = _speech("a", 8.001, 9.0), _speech("a", 8.0, 9.0)
    (one,) = _assembled([stale, kept, _summary("a", [], [kept], info=NO_VIDEO)], names="a").take()
    assert one.video["transcript"] == "said at 8.0"
    (two,) = _assembled([kept, _summary("a", info=None, error=("storage", "no"))], names="a").take()
    assert (two.video["speech_status"], two.segments) == ("failed", [])


def test_only_what_a_commit_would_release_counts_towards_its_size():
    assembler = Assembler([_todo("a", part="part-1"), _todo("b", part="part-1"), _todo("c")], IDENTITY)
    for row in (*_rows_of("a"), *_rows_of("b")[:-1]):
        assembler.add(row)
    assert assembler.num_bytes == 0
    for row in _rows_of("c"):
        assembler.add(row)
    with_new = assembler.num_bytes
    assert with_new > 0
    assembler.add(_rows_of("b")[-1])
    assert assembler.num_bytes > 2 * with_new
    assembler.take()
    assert assembler.num_bytes == 0


def _video(**more):
    rows = [_clip("a", 0), _speech("a", 1.0, 2.0)]
    (one,) = _assembled([*rows, _summary("a", rows[:1], rows[1:])], names="a").take()
    return one.video | more


def test_a_component_that_is_kept_keeps_its_columns():
    new = _video(caption_status="ok", num_clips=9, speech_status="skipped", num_segments=0, transcript=None)
    merged = merge(_video(), new, keep_caption=False, keep_speech=True)
    assert (merged["num_clips"], merged["num_segments"], merged["transcript"]) == (9, 1, "said at 1.0")
    assert (merged["status"], merged["speech_status"]) == ("ok", "ok")


def test_a_kept_components_trouble_stays_told():
    old = _video(status="partial", speech_status="failed", error_type="engine_crashed", error_message="no")
    merged = merge(old, _video(speech_status="skipped"), keep_caption=False, keep_speech=True)
    assert (merged["status"], merged["error_type"]) == ("partial", "engine_crashed")


def test_a_redo_that_cannot_open_the_file_loses_no_facts():
    facts = ("duration_s", "width", "height", "codec", "num_frames", "tracks")
    nothing = dict.fromkeys(facts)
    new = _video(**nothing, status="failed", caption_status="failed", speech_status="skipped", error_type="storage")
    merged = merge(_video(), new, keep_caption=False, keep_speech=True)
    assert {name: merged[name] for name in facts} == {name: _video()[name] for name in facts}
    assert (merged["status"], merged["error_type"]) == ("partial", "storage")


def test_damage_outlives_a_redo_of_one_component():
    merged = merge(_video(status="partial"), _video(caption_status="skipped"), keep_caption=True, keep_speech=False)
    assert merged["status"] == "partial"


def _merged(row, **body):
    return Row(row.kind, row.video_id, row.item_id, {"status": "ok", "summary": "all of it", "flags": []} | body)


def _with_summaries(rows, names="a"):
    assembler = Assembler([_todo(name) for name in names], IDENTITY, summaries=True)
    for row in rows:
        assembler.add(row)
    return assembler


@given(st.permutations(_rows_of("a")))
def test_a_video_waits_for_the_summary_of_all_its_captions_in_order_of_time(rows):
    assembler = _with_summaries(rows[:-1])
    assert assembler.to_summarise() == []
    assembler.add(rows[-1])
    assert assembler.take(everything=True) == []
    (asked,) = assembler.to_summarise()
    assert asked.body["captions"] == [(0.0, 6.0, "a 0"), (12.0, 18.0, "a 1")]
    assembler.add(_merged(asked))
    (one,) = assembler.take()
    assert (one.video["summary"], one.video["status"], len(one.clips)) == ("all of it", "ok", 2)
    assert assembler.to_summarise() == []


def test_a_video_without_a_caption_needs_no_summary():
    failed = {"status": "failed", "error_type": "unreadable", "error_message": "no", "caption": None}
    clip = _clip("a", 0, **failed)
    silent = _with_summaries([clip, _summary("a", [clip])])
    assert [one.video["summary"] for one in silent.take()] == [None]
    only_sound = _with_summaries([_summary("a", [])])
    assert len(only_sound.take()) == 1


def test_a_summary_that_fails_or_is_lost_leaves_the_captions_and_says_so():
    assembler = _with_summaries([*_rows_of("a"), *_rows_of("b")], "ab")
    asked = {row.video_id: row for row in assembler.to_summarise()}
    assembler.add(_merged(asked["a"], status="failed", error_type="too_long", error_message="much"))
    assembler.give_up()
    videos = {one.video["video_id"]: one.video for one in assembler.take()}
    assert {name: (v["status"], v["caption_status"], v["error_type"]) for name, v in videos.items()} == {
        "a": ("partial", "partial", "too_long"),
        "b": ("partial", "partial", "lost"),
    }


def test_summaries_survive_a_crash():
    before = _with_summaries([*_rows_of("a"), *_rows_of("b")[:-1]], "ab")
    before.add(_merged(before.to_summarise()[0]))
    after = _with_summaries([], "ab")
    after.load(before.save())
    assert [one.video["summary"] for one in after.take()] == ["all of it"]


def test_the_captions_fingerprint_follows_the_metadata_that_prompts_show():
    prints = Fingerprints(decode="d", caption="c", speech="s", metadata=("title",))
    sources = [Source("a", "file:///a", "v1", 10, {"title": t, "other": o}) for t, o in ("xy", "xz", "uy")]
    first, same, other = (prints.of_caption(source) for source in sources)
    assert first == same != other
