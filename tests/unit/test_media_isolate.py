"""The decoding process may hang, crash or swell; what asked for the decode goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jobs.conformance.assets import AAC, x264
from jobs.conformance.recipe import render
from qwen_ray.config import DecodeConfig
from qwen_ray.errors import InputError, ResourceError, RowError
from qwen_ray.media import child
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import ClipFrames, DecodeRequest, Done, Opened
from qwen_ray.media.isolate import DecodeBug, Decoder

LARGE = {"min_pixels": 900_000, "max_pixels": 1_000_000}
"""Clips that do not fit into the socket, so that the process must wait for whoever asked."""


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    render(path, video=x264(60, "-bf", "2"), audio=AAC)
    return str(path)


@pytest.fixture
def decoder():
    with Decoder() as decoder:
        yield decoder


def request(path, **decode):
    """All frames wanted of a file, and how."""
    return DecodeRequest(path=path, decode=DecodeConfig(**decode))


def gone(pid):
    """Whether a process ends within a few seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_the_process_answers_as_the_generator_does(decoder, film):
    wanted = request(film, window_s=3.0)
    here, there = list(decode_events(wanted)), list(decoder.decode(wanted))
    assert here[0] == there[0]
    assert here[-1] == there[-1]
    assert [type(event) for event in here] == [type(event) for event in there]
    for one, other in zip(here[1:-1], there[1:-1], strict=True):
        assert np.array_equal(one.frames_THWC, other.frames_THWC)
        assert other.frames_THWC.flags.c_contiguous
        assert one.frame_times_s == other.frame_times_s


def test_one_process_serves_file_after_file(decoder, film, tmp_path):
    assert decoder.pid is None
    list(decoder.decode(DecodeRequest(path=film)))
    pid = decoder.pid
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        list(decoder.decode(DecodeRequest(path=str(tmp_path / "empty.mp4"))))
    assert caught.value.error_type == "empty_file"
    assert isinstance(list(decoder.decode(DecodeRequest(path=film)))[-1], Done)
    assert decoder.pid == pid


def test_a_hang_ends_at_the_deadline_and_the_next_file_decodes(decoder, film):
    list(decoder.decode(DecodeRequest(path=film)))
    hung = decoder.pid
    os.kill(hung, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RowError) as caught:
        list(decoder.decode(request(film, deadline_s=0.5)))
    assert caught.value.error_type == "decode_timeout"
    assert time.monotonic() - began < 5
    assert gone(hung)
    assert isinstance(list(decoder.decode(DecodeRequest(path=film)))[-1], Done)


def test_a_hang_in_the_middle_of_a_clip_ends_too(decoder, film):
    list(decoder.decode(DecodeRequest(path=film)))  # started and warm
    events = decoder.decode(request(film, window_s=0.2, **LARGE, deadline_s=2))
    next(events)
    time.sleep(0.3)  # the process fills the socket and waits for us, a clip half sent
    os.kill(decoder.pid, signal.SIGSTOP)
    with pytest.raises(RowError) as caught:
        list(events)
    assert caught.value.error_type == "decode_timeout"


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGSEGV, "decode_crashed", "signal 11"), (signal.SIGKILL, "decode_memory", "signal 9")],
)
def test_a_crash_becomes_an_error_and_the_next_file_decodes(decoder, film, number, code, words):
    events = decoder.decode(request(film, window_s=0.2, **LARGE))
    assert isinstance(next(events), Opened)
    os.kill(decoder.pid, number)
    with pytest.raises(RowError) as caught:
        list(events)
    assert caught.value.error_type == code
    assert words in caught.value.message
    assert str(Path(film).parent) not in caught.value.message
    assert isinstance(list(decoder.decode(DecodeRequest(path=film)))[-1], Done)


def test_a_process_that_died_between_files_is_replaced(decoder, film):
    list(decoder.decode(DecodeRequest(path=film)))
    dead = decoder.pid
    os.kill(dead, signal.SIGKILL)
    decoder._process.wait()
    assert isinstance(list(decoder.decode(DecodeRequest(path=film)))[-1], Done)
    assert decoder.pid != dead


def test_memory_is_bounded_where_that_is_asked(film):
    with Decoder(memory_bytes=256 << 20) as decoder:
        assert isinstance(list(decoder.decode(DecodeRequest(path=film)))[-1], Done)
        huge = request(film, min_pixels=90_000_000, max_pixels=100_000_000, num_frames=16)
        with pytest.raises(ResourceError) as caught:
            list(decoder.decode(huge))
        assert caught.value.error_type == "decode_memory"
        assert "0.25 GiB of decode.memory_gb" in caught.value.message


def test_a_file_has_a_deadline_of_its_own_that_signs_of_life_do_not_move(decoder, film):
    list(decoder.decode(DecodeRequest(path=film)))  # started and warm
    large = {"min_pixels": 3_500_000, "max_pixels": 4_000_000}
    events = decoder.decode(request(film, window_s=0.05, **large, deadline_s=60, file_deadline_s=1))
    seen = []
    with pytest.raises(RowError) as caught:
        seen.extend(events)
    assert caught.value.error_type == "decode_timeout"
    assert "film.mp4: the decoder worked on it for 1 s; decode.file_deadline_s" in caught.value.message
    assert len(seen) >= 2  # signs of life, as beats are
    assert decoder.pid is None


def test_the_deadline_of_a_file_leaves_out_what_its_taker_does(decoder, film):
    list(decoder.decode(DecodeRequest(path=film)))  # started and warm
    seen = []
    for event in decoder.decode(request(film, window_s=1.0, file_deadline_s=2.0)):
        time.sleep(0.3)  # 3 s of the taker's time in all
        seen.append(event)
    assert [type(event) for event in seen] == [Opened, *[ClipFrames] * 8, Done]


def test_the_system_kills_the_decoder_before_the_one_who_asked(film):
    code = (
        "import sys; from pathlib import Path; from qwen_ray.media.isolate import Decoder\n"
        "from qwen_ray.media.events import DecodeRequest\n"
        "score = Path('/proc/self/oom_score_adj'); score.write_text('1000')  # as Ray starts its workers\n"
        "decoder = Decoder(); list(decoder.decode(DecodeRequest(path=sys.argv[1])))\n"
        "print(score.read_text().strip(), Path(f'/proc/{decoder.pid}/oom_score_adj').read_text().strip())"
    )
    told = subprocess.run([sys.executable, "-c", code, film], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["900", "1000"]


def test_memory_stays_flat_over_many_files(decoder, tmp_path):
    path = str(tmp_path / "large.mp4")
    render(path, 30, size=(1280, 720), video=("-c:v", "libx264", "-preset", "ultrafast"))
    used_mb = []
    for _ in range(16):
        list(decoder.decode(DecodeRequest(path=path)))
        pages = int(Path(f"/proc/{decoder.pid}/statm").read_text().split()[1])
        used_mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    # what is free but not given back comes and goes; a decoder that is not let go costs 12 MB a file, for good
    assert min(used_mb[8:]) - min(used_mb[:8]) < 20


def test_long_work_without_a_result_is_no_hang(decoder, tmp_path):
    path = str(tmp_path / "long.mp4")
    render(path, 400, size=(1280, 720), video=("-c:v", "libx264", "-preset", "ultrafast", "-g", "10000"))
    list(decoder.decode(DecodeRequest(path=path, want_frames=False)))  # started and warm
    wanted = request(path, window_s=1000, num_frames=2, deadline_s=2)
    assert [type(event) for event in decoder.decode(wanted)] == [Opened, ClipFrames, Done]


def test_signs_of_life_are_few(monkeypatch):
    now_s, sent = [0.0], []
    monkeypatch.setattr(child.time, "monotonic", lambda: now_s[0])
    beat = child._every(0.5, lambda: sent.append(now_s[0]))
    for now_s[0] in np.arange(0, 2, 0.01):
        beat()
    assert sent == pytest.approx([0.5, 1.0, 1.5], abs=0.02)


def test_leaving_early_ends_the_process(decoder, film):
    events = decoder.decode(request(film, window_s=0.2))
    next(events)
    pid = decoder.pid
    events.close()
    assert gone(pid)
    assert decoder.pid is None


def test_a_bug_is_not_taken_for_a_bad_file(decoder, film):
    with pytest.raises(DecodeBug) as caught:
        list(decoder.decode(DecodeRequest(path=film, windows=((0.0, "many"),))))
    assert "TypeError" in str(caught.value)
    assert "sampling.py:" in str(caught.value)
    assert "Traceback" in caught.value.report
    assert isinstance(list(decoder.decode(DecodeRequest(path=film)))[-1], Done)


def test_the_process_ends_with_its_parent(film):
    code = (
        "import os, sys; from qwen_ray.media.isolate import Decoder; from qwen_ray.media.events import DecodeRequest\n"
        "decoder = Decoder(); events = decoder.decode(DecodeRequest(path=sys.argv[1])); next(events)\n"
        "print(decoder.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, film]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    assert gone(child)


def test_asking_for_a_decode_loads_no_decoder():
    code = "import sys, qwen_ray.media.isolate, qwen_ray.media.events; print({'av', 'torch', 'ray'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "set()"


def test_decoding_loads_neither_torch_nor_ray():
    code = "import sys, qwen_ray.media.child; print({'torch', 'ray', 'onnxruntime'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "set()"
