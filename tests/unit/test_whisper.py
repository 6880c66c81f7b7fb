"""Both Whisper engines on the sample videos: right words at their times, whatever shares a batch."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from qwen_ray.config import SpeechConfig
from qwen_ray.engines import build
from qwen_ray.engines.whisper.passages import Passage, passages, token_starts_s, words
from qwen_ray.errors import ConfigError, RequestError
from tests.voices import TRUTH, end_to_end, said, sample_chunks, spoken

FIRST_TIME = 50_363  # of the English models
END = 50_256


def load(folder, **settings):
    config = SpeechConfig(engine="whisper", model=str(folder), **{"language": "en", "beam_size": 1, **settings})
    return build.speech_engine(config, build.resolve(config), cuda=False)


@pytest.fixture(scope="module")
def engine(whisper_folder):
    engine = load(whisper_folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def faster():
    config = SpeechConfig(language="en")
    engine = build.speech_engine(config, build.resolve(config), cuda=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def chunks():
    return {name: sample_chunks(name) for name in TRUTH}


def hear(engine, chunks):
    """Words of each video."""
    return {
        name: [w for one in parts for w in said(engine.transcribe(one.pcm_int16))] for name, parts in chunks.items()
    }


def num_different(found, expected):
    assert {name: len(text) for name, text in found.items()} == {name: len(text) for name, text in expected.items()}
    return sum(a != b for name in expected for a, b in zip(found[name], expected[name], strict=True))


# ------------------------------------------------------------------------------------------------- text
def test_both_engines_write_the_script(engine, faster, chunks, whisper_folder):
    script = {name: spoken(truth["script"]) for name, truth in TRUTH.items()}
    heard = hear(engine, chunks)
    assert num_different(hear(faster, chunks), script) == 0
    assert num_different(heard, script) <= 1  # in float32, this model hears "a picture" for "the picture"
    with_beams = load(whisper_folder, beam_size=5)
    assert hear(with_beams, {"two-scenes.mp4": chunks["two-scenes.mp4"]})["two-scenes.mp4"] == script["two-scenes.mp4"]
    with_beams.close()


def test_what_shares_a_batch_changes_nothing(engine, chunks):
    parts = [one for parts in chunks.values() for one in parts]
    sounds = [*(one.pcm_int16 for one in parts[2:]), end_to_end(parts[:6])]
    alone = [engine.transcribe(sound) for sound in sounds]
    order = np.random.default_rng(0).permutation(len(sounds)).tolist()
    with ThreadPoolExecutor(len(order)) as threads:
        together = list(threads.map(lambda k: engine.transcribe(sounds[k]), order))
    for k, found in zip(order, together, strict=True):
        assert [one.text for one in found] == [one.text for one in alone[k]]
        for one, other in zip(found, alone[k], strict=True):
            assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-3)
            assert one.no_speech_prob == pytest.approx(other.no_speech_prob, abs=1e-3)
            times = [[word.start_s for word in segment.words] for segment in (one, other)]
            assert times[0] == pytest.approx(times[1], abs=0.041)


def test_a_request_that_is_refused_leaves_its_neighbours_alone(engine, chunks):
    (good,) = chunks["square dance.mp4"]
    too_long = np.zeros(31 * 16_000, np.int16)
    stereo = np.zeros((16_000, 2), np.int16)
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(engine.transcribe, pcm) for pcm in [good.pcm_int16, too_long, stereo] * 2]
        for answer in answers[1::3]:
            with pytest.raises(RequestError, match=r"31\.0 s.* 30 s"):
                answer.result()
        for answer in answers[2::3]:
            with pytest.raises(RequestError, match="2 axes"):
                answer.result()
        for answer in answers[::3]:
            assert said(answer.result()) == spoken(TRUTH["square dance.mp4"]["script"])


@pytest.mark.parametrize("loudness", [0, 30, 3000])
def test_text_over_no_speech_is_flagged(engine, loudness):
    noise = (np.random.default_rng(0).normal(size=8 * 16_000) * loudness).astype(np.int16)
    assert all(one.flags for one in engine.transcribe(noise))
    assert engine.transcribe(noise[:0]) == []


def test_a_bound_ends_the_text(whisper_folder, chunks):
    (chunk,) = chunks["square dance.mp4"]
    for bound, text in ((1, ""), (4, "This video was")):  # the first token is a time
        engine = load(whisper_folder, max_new_tokens=bound)
        assert said(engine.transcribe(chunk.pcm_int16)) == spoken(text)
        engine.close()


# ------------------------------------------------------------------------------------------------- time
def test_words_are_where_they_were_spoken(engine, chunks):
    for name, parts in chunks.items():
        found = [
            (part.start_s + word.start_s, word.word)
            for part in parts
            for segment in engine.transcribe(part.pcm_int16)
            for word in segment.words
        ]
        for sentence in TRUTH[name]["speech"]:
            inside = [w for start_s, w in found if sentence["start_s"] - 0.5 <= start_s < sentence["end_s"] + 0.1]
            assert len(inside) == len(spoken(sentence["text"])), (name, inside)


def test_both_engines_place_words_alike(engine, faster, chunks):
    for part in chunks["two-scenes.mp4"]:
        ours, theirs = (
            [word for segment in one.transcribe(part.pcm_int16) for word in segment.words] for one in (engine, faster)
        )
        assert [word.word.strip(".,") for word in ours] == [word.word.strip(".,") for word in theirs]
        for a, b in zip(ours[1:], theirs[1:], strict=True):  # the first may begin in the silence before it
            assert a.start_s == pytest.approx(b.start_s, abs=0.1)


def test_times_are_inside_the_chunk_and_in_order(engine, chunks):
    sound = end_to_end([one for parts in chunks.values() for one in parts][:6])
    found = engine.transcribe(sound)
    assert len(found) >= 4
    times = [t for one in found for w in one.words for t in (w.start_s, w.end_s)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= len(sound) / 16_000
    for one in found:
        assert (one.start_s, one.end_s) == (one.words[0].start_s, one.words[-1].end_s)
        assert spoken(" ".join(word.word for word in one.words)) == spoken(one.text)


def test_without_alignment_heads_there_are_no_words(whisper_folder, tmp_path, chunks):
    shutil.copytree(whisper_folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    values = json.loads(path.read_text())
    del values["alignment_heads"]
    path.write_text(json.dumps(values))
    engine = load(tmp_path / "model")
    (chunk,) = chunks["square dance.mp4"]
    (found,) = engine.transcribe(chunk.pcm_int16)
    assert said([found]) == spoken(TRUTH["square dance.mp4"]["script"])
    assert found.words == ()
    assert 0 <= found.start_s < found.end_s <= chunk.end_s - chunk.start_s
    engine.close()


# ------------------------------------------------------------------------------------------------- tokens
def _time(seconds):
    return FIRST_TIME + round(seconds / 0.02)


@pytest.mark.parametrize(
    ("written", "expected", "done_s"),
    [
        ([_time(0), 1, 2, _time(3)], [(0, 3, (1, 2))], 10),
        ([_time(0.5), 1, _time(3), _time(4), 2, _time(6)], [(0.5, 3, (1,)), (4, 6, (2,))], 10),
        ([_time(0), 1, _time(3), _time(3), 2, 3], [(0, 3, (1,))], 3),  # the window ended inside the second
        ([_time(0), 1, _time(3), _time(3)], [(0, 3, (1,))], 3),
        ([_time(1), 1, 2], [(1, 10, (1, 2))], 10),  # never ended
        ([_time(0), 1, _time(25)], [(0, 10, (1,))], 10),  # beyond the sound
        ([_time(0), _time(3)], [], 10),
        ([], [], 10),
    ],
)
def test_passages_of_tokens(written, expected, done_s):
    found, done = passages(written, FIRST_TIME, 10.0)
    assert [(one.start_s, one.end_s, one.token_ids) for one in found] == [
        (pytest.approx(start), pytest.approx(end), ids) for start, end, ids in expected
    ]
    assert done == pytest.approx(done_s)


def test_the_cheapest_path_is_found():
    rng = np.random.default_rng(1)
    likeness = rng.normal(size=(5, 9)).astype(np.float32)
    starts = (token_starts_s(likeness) / 0.02).round().astype(int)

    def best(i, j):  # by trying every path
        if (i, j) == (0, 0):
            return likeness[0, 0], [0]
        ways = [best(a, b) for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if a >= 0 and b >= 0]
        value, path = max(ways, key=lambda way: way[0])
        return value + likeness[i, j], path if len(path) == i + 1 else [*path, j]

    assert starts.tolist() == best(4, 8)[1]


def test_words_are_whole_and_end_before_their_marks():
    pieces = [" A", " well", "-", "known", " “", "word", "”", ".", " Don", "'", "t"]
    starts_s = np.arange(len(pieces) + 1) * 0.5
    found = words(
        Passage(0.0, 5.2, tuple(range(len(pieces)))),
        lambda ids: "".join(pieces[k] for k in ids),
        starts_s,
        np.ones(len(pieces), np.float32),
        "en",
    )
    assert [word.word for word in found] == ["A", "well-known", "“word”.", "Don't"]
    assert [word.end_s for word in found[:3]] == [0.5, 2.0, 3.0]
    assert found[-1].end_s == 5.2


def test_characters_of_several_tokens_stay_whole_in_a_language_without_spaces():
    raw = "你好。".encode()
    found = words(
        Passage(0.0, 9.0, tuple(raw)),
        lambda ids: bytes(ids).decode("utf-8", "replace"),
        np.arange(len(raw) + 1) * 0.1,
        np.full(len(raw), 0.5, np.float32),
        "zh",
    )
    assert [(word.word, round(word.end_s, 2)) for word in found] == [("你", 0.3), ("好。", 0.6)]


# ------------------------------------------------------------------------------------------------- models
@pytest.fixture(scope="module")
def multilingual(whisper_folder, tmp_path_factory):
    """The English model with the tokens of the others, which begin one later; French is what it is surest of."""
    folder = tmp_path_factory.mktemp("multilingual")
    shutil.copytree(whisper_folder, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["id"] += 1
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({"<|endoftext|>": END + 1, "<|none|>": END})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}

    weights = load_file(folder / "model.safetensors")
    old = weights["model.decoder.embed_tokens.weight"]
    new = np.insert(old.numpy(), END, 0, axis=0)
    start, zero = new[ids["<|startoftranscript|>"]], new[FIRST_TIME + 1]
    new[ids["<|startoftranscript|>"] + 1 : ids["<|transcribe|>"] + 1] = start  # a longer prompt, to a model without one
    new[ids["<|fr|>"]] = start + 0.1 * zero
    weights["model.decoder.embed_tokens.weight"] = old.new_tensor(new)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        moved = {key: value + 1 for key, value in values.items() if key.endswith("token_id") and value}
        moved |= {"vocab_size": 51865} if name == "config.json" else {"begin_suppress_tokens": [220, END + 1]}
        (folder / name).write_text(json.dumps(values | moved))
    return folder


def test_the_language_is_found_out_or_given(multilingual, chunks):
    (chunk,) = chunks["square dance.mp4"]
    for asked, expected in (("", "fr"), ("en", "en"), ("de", "de")):
        engine = load(multilingual, language=asked, max_new_tokens=40)
        found = engine.transcribe(chunk.pcm_int16)[0]
        assert found.language == expected
        assert said([found]) == spoken(TRUTH["square dance.mp4"]["script"])
        engine.close()
    with pytest.raises(ConfigError, match=r"speech\.language = 'xx'"):
        load(multilingual, language="xx")


def test_a_model_of_another_form_or_language_is_refused(whisper_folder, tmp_path):
    theirs = build.resolve(SpeechConfig()).location
    with pytest.raises(ConfigError, match="CTranslate2 form, which"):
        build.resolve(SpeechConfig(engine="whisper", model=theirs))
    with pytest.raises(ConfigError, match="CTranslate2 form"):
        build.resolve(SpeechConfig(engine="whisper"))
    with pytest.raises(ConfigError, match="transformers form, which"):
        build.resolve(SpeechConfig(model=str(whisper_folder)))
    with pytest.raises(ConfigError, match="'qwen2_5_vl'"):
        build.resolve(SpeechConfig(engine="whisper", model="builtin:tiny-qwen2.5-vl"))
    with pytest.raises(ConfigError, match=r"speech\.language = 'de': this Whisper knows en"):
        load(whisper_folder, language="de")


def test_a_size_is_a_hub_id():
    assert build.whisper_repository(SpeechConfig(engine="whisper", model="large-v3-turbo")) == (
        "openai/whisper-large-v3-turbo"
    )
    assert build.whisper_repository(SpeechConfig(model="small")) == "Systran/faster-whisper-small"
    assert build.whisper_repository(SpeechConfig(engine="whisper", model="a/b")) == "a/b"


def test_a_confused_model_is_asked_a_bounded_number_of_times(whisper_folder, tmp_path, monkeypatch):
    """One that likes the first times above all, so that it closes every passage at once and begins another."""
    folder, diary = tmp_path / "confused", tmp_path / "diary"
    shutil.copytree(whisper_folder, folder)
    diary.mkdir()
    stated = json.loads((folder / "generation_config.json").read_text())
    word, times = 262, range(FIRST_TIME, FIRST_TIME + 4)
    stated["suppress_tokens"] = [token for token in range(51_864) if token != word and token not in times]
    (folder / "generation_config.json").write_text(json.dumps(stated))
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.decoder.embed_tokens.weight"]
    weights["model.decoder.layer_norm.bias"] += 20 * (embedding[list(times)].mean(0) - embedding[word])
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setenv("QWEN_RAY_TRACE", str(diary))
    engine = load(folder, max_new_tokens=8)
    found = engine.transcribe(np.random.default_rng(0).integers(-3000, 3000, 10 * 16_000).astype(np.int16))
    engine.close()
    (path,) = diary.iterdir()
    assert 1 < len(path.read_text().splitlines()) <= 10
    assert all(0 <= segment.start_s <= segment.end_s <= 10 for segment in found)
