"""An engine's process may crash, hang, or never come up; each request gets its own answer or its own error."""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from qwen_ray.engines import journal
from qwen_ray.engines.isolated import IsolatedEngine
from qwen_ray.engines.protocol import Caption
from qwen_ray.errors import ConfigError, EngineError, RequestError, ResourceError


@dataclass(frozen=True)
class Request:
    """What the engine below is asked: to do `deed`, then to say what it has received."""

    clip_id: str
    deed: str = ""
    frames_THWC: np.ndarray | None = None


def die(number):
    """Die of a signal, and do nothing more on this thread while another takes it."""
    os.kill(os.getpid(), number)
    threading.Event().wait()


class Engine:
    """Works on up to 8 requests a step; a deed is done before any of its step is answered."""

    precision = "float32"

    def __init__(self, folder, first=0):
        """`folder/boots` gets a line; the first process starts to work when it has `first` requests."""
        with (folder / "boots").open("a") as boots:
            boots.write(f"{os.getpid()}\n")
        self._folder, self._first = folder, first if len(pids(folder)) == 1 else 0
        self._waiting, self._arrived, self._broken = [], threading.Condition(), None
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, request):
        answer = Future()
        if request.deed == "crash on arrival":
            die(signal.SIGSEGV)
        if request.deed == "refuse":
            raise LookupError("not a deed")
        with self._arrived:
            self._waiting.append((request, answer))
            self._arrived.notify()
        return answer

    def close(self):
        (self._folder / "closed").touch()

    def _serve(self):
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: len(self._waiting) >= self._enough())
                self._first = 0
                step, self._waiting = self._waiting[:8], self._waiting[8:]
            self._step(step)

    def _enough(self):
        together = bool(self._waiting) and self._waiting[0][0].deed == "together"
        return max(1, self._first, 8 if together else 1)

    def _step(self, step):
        self._tell([request.clip_id for request, _ in step])
        for request, _ in step:
            self._do(request.deed)
        for request, answer in step:
            if request.deed == "late":
                continue
            if self._broken or request.deed == "too large":
                answer.set_exception(self._broken or ResourceError("out_of_memory", request.clip_id))
            else:
                answer.set_result(Caption(seen(request), "stop", 1, 2))
        if any(request.deed == "late" for request, _ in step):  # a GPU's fault, seen when the next step is sent off
            self._tell([request.clip_id for request, _ in self._waiting[:8]])
            die(signal.SIGSEGV)

    def _tell(self, keys):
        """An engine that does not say what it works on."""

    def _do(self, deed):
        match deed.split():
            case ["signal", number]:
                die(int(number))
            case ["exit"]:
                os._exit(3)
            case ["fault"]:
                self._broken = EngineError("CUDA error: an illegal memory access was encountered")
            case ["hang"]:
                threading.Event().wait()
            case ["work"]:
                for _ in range(20):
                    threading.Event().wait(0.1)
                    self._tell(["work"])
            case ["hold", path]:  # a hang in native code that never lets go of Python's lock
                Path(path).write_text("held")
                ctypes.PyDLL(None).pause()
            case ["leave", "behind"]:
                if os.fork() == 0:
                    signal.pause()
                die(signal.SIGSEGV)


class TellingEngine(Engine):
    """The same, saying what it works on."""

    on_step = None

    def _tell(self, keys):
        self.on_step(keys)


def seen(request):
    """Which request it was, and every byte of its frames."""
    frames = request.frames_THWC
    pixels = "" if frames is None else f"{frames.shape} {hashlib.sha256(frames.tobytes()).hexdigest()}"
    return f"{request.clip_id} {pixels}"


def pids(folder):
    """The processes so far."""
    return [int(line) for line in (folder / "boots").read_text().split()]


def ends(pid):
    """Whether a process ends within a few seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def ask(engine, deeds):
    """The answers to requests 0, 1, ... with these deeds, or their errors."""
    futures = [engine.submit(Request(str(k), deed)) for k, deed in enumerate(deeds)]
    return [future.exception(60) or future.result().text for future in futures]


SEGV, KILL = f"signal {signal.SIGSEGV.value}", f"signal {signal.SIGKILL.value}"
KINDS = pytest.mark.parametrize("kind", [Engine, TellingEngine])


@KINDS
@pytest.mark.parametrize(
    ("deed", "how"),
    [(SEGV, "signal 11 (SIGSEGV)"), (KILL, "signal 9 (SIGKILL)"), ("exit", "exit code 3"), ("fault", "illegal memory")],
)
def test_one_poisoned_request_of_a_thousand_costs_two_processes_and_no_other_answer(tmp_path, kind, deed, how):
    with closing(IsolatedEngine(partial(kind, tmp_path))) as engine:
        assert engine.precision == "float32"
        answers = ask(engine, [deed if k == 500 else "" for k in range(1000)])
    poisoned = answers.pop(500)
    assert isinstance(poisoned, RequestError)
    assert poisoned.error_type == "engine_crashed"
    assert how in poisoned.message
    assert answers == [f"{k} " for k in range(1000) if k != 500]
    assert len(pids(tmp_path)) == 3
    assert all(ends(pid) for pid in pids(tmp_path))
    assert (tmp_path / "closed").exists()


@KINDS
def test_two_poisons_in_one_step(tmp_path, kind):
    with closing(IsolatedEngine(partial(kind, tmp_path, first=20))) as engine:
        answers = ask(engine, [SEGV if k in (2, 5) else "" for k in range(20)])
    assert [k for k, answer in enumerate(answers) if isinstance(answer, RequestError)] == [2, 5]
    assert [answer for answer in answers if isinstance(answer, str)] == [f"{k} " for k in range(20) if k not in (2, 5)]
    assert len(pids(tmp_path)) == 4


def test_only_what_was_in_work_is_suspected(tmp_path):
    # the first eight are one step; the others are never answered alone
    deeds = ["", SEGV, *[""] * 6, *["together"] * 8]
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path, first=16), deadline_s=5)) as engine:
        answers = ask(engine, deeds)
    assert isinstance(answers.pop(1), RequestError)
    assert answers == [f"{k} " for k in range(16) if k != 1]
    assert len(pids(tmp_path)) == 3


def test_a_fault_that_shows_in_the_next_step_is_found(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path, first=16))) as engine:
        answers = ask(engine, ["late" if k == 1 else "" for k in range(16)])
    assert isinstance(answers.pop(1), RequestError)
    assert answers == [f"{k} " for k in range(16) if k != 1]
    assert len(pids(tmp_path)) == 3


def test_a_request_that_crashes_on_arrival_is_found(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path))) as engine:
        answers = ask(engine, ["crash on arrival" if k == 30 else "" for k in range(60)])
    assert isinstance(answers.pop(30), RequestError)
    assert answers == [f"{k} " for k in range(60) if k != 30]
    assert len(pids(tmp_path)) == 3


def test_errors_of_one_request_fail_that_one(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path, first=2))) as engine:
        large, refused, fine = ask(engine, ["too large", "refuse", ""])
        assert isinstance(large, ResourceError)
        assert (large.error_type, large.message) == ("out_of_memory", "0")
        assert isinstance(refused, LookupError)
        assert "in submit" in refused.__notes__[0]  # where it was raised
        assert fine == "2 "
        assert len(pids(tmp_path)) == 1


def test_a_process_that_died_idle_is_replaced(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path))) as engine:
        assert ask(engine, [""]) == ["0 "]
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert ask(engine, [""] * 3) == ["0 ", "1 ", "2 "]


def test_what_a_dead_process_has_forked_keeps_nobody_waiting(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path))) as engine:
        crashed, fine = ask(engine, ["leave behind", ""])
    assert isinstance(crashed, RequestError)
    assert fine == "1 "


@KINDS
def test_a_hung_process_is_replaced(tmp_path, kind):
    with closing(IsolatedEngine(partial(kind, tmp_path, first=2), deadline_s=1)) as engine:
        hung, fine = ask(engine, ["hang", ""])
        assert isinstance(hung, RequestError)
        assert "no answer and no step for 1 s" in hung.message
        assert fine == "1 "
        assert len(pids(tmp_path)) == 3


def test_a_process_that_takes_nothing_in_is_replaced(tmp_path):
    frames = np.zeros((16, 364, 644, 3), np.uint8)
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path), deadline_s=1)) as engine:
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
        request = Request("k", frames_THWC=frames)
        assert engine.submit(request).result(60).text == seen(request)
        assert len(pids(tmp_path)) == 2


def test_steps_are_signs_of_life(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path), deadline_s=1)) as engine:
        assert ask(engine, ["work"]) == ["0 "]
        assert len(pids(tmp_path)) == 1


def test_many_threads_get_the_answers_to_their_own_requests_byte_for_byte(tmp_path):
    draw = np.random.default_rng(0)
    films = [draw.integers(0, 256, (2, 28 * (1 + k % 5), 56, 3), dtype=np.uint8) for k in range(400)]
    films[7] = films[7][:, ::2, :, ::-1]  # strided
    films[8].flags.writeable = False  # as rows come from Ray's store

    def answer(k):
        request = Request(f"{k}", SEGV if k == 200 else "", films[k])
        return engine.submit(request).exception(60) or engine.submit(request).result(60).text == seen(request)

    with closing(IsolatedEngine(partial(TellingEngine, tmp_path))) as engine, ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(answer, range(400)))
    assert isinstance(answers.pop(200), RequestError)
    assert answers == [True] * 399


def test_equal_keys_are_different_requests(tmp_path):
    with closing(IsolatedEngine(partial(TellingEngine, tmp_path, first=3))) as engine:
        deeds = ["", SEGV, ""]
        futures = [engine.submit(Request("same", deed)) for deed in deeds]
        assert [type(future.exception(60)) for future in futures] == [type(None), RequestError, type(None)]


def test_a_process_that_never_comes_up_is_one_error():
    with pytest.raises(EngineError, match=r"in 3 tries; the last time: it died by exit code 7 while making the engine"):
        IsolatedEngine(partial(os._exit, 7))


def test_a_process_that_comes_up_too_late_is_an_error():
    with pytest.raises(EngineError, match=r"not made within 0\.2 s"):
        IsolatedEngine(signal.pause, boot_deadline_s=0.2)


def _comes_up_on(turn, folder):
    Engine(folder)
    if len(pids(folder)) not in turn:
        die(signal.SIGKILL)
    return TellingEngine(folder / "engine")


def test_a_process_that_comes_up_the_second_time_serves(tmp_path):
    (tmp_path / "engine").mkdir()
    with closing(IsolatedEngine(partial(_comes_up_on, [2], tmp_path))) as engine:
        assert ask(engine, [""]) == ["0 "]


def test_where_no_process_comes_up_again_all_requests_fail_and_later_ones_too(tmp_path):
    (tmp_path / "engine").mkdir()
    with closing(IsolatedEngine(partial(_comes_up_on, [1], tmp_path))) as engine:
        for answer in (*ask(engine, ["", SEGV] * 20), *ask(engine, [""])):
            if answer not in {f"{k} " for k in range(20)}:
                assert isinstance(answer, EngineError)
                assert "in 3 tries" in str(answer)
        assert len(pids(tmp_path)) == 4


def _misconfigured():
    raise ConfigError("caption.model = 'x': no such model")


def _buggy():
    raise KeyError("weights")


def test_errors_of_construction_come_out_as_themselves():
    with pytest.raises(ConfigError, match=r"caption\.model = 'x': no such model"):
        IsolatedEngine(_misconfigured)
    with pytest.raises(KeyError) as caught:
        IsolatedEngine(_buggy)
    assert "in _buggy" in caught.value.__notes__[0]


def test_closing_answers_what_waits_even_while_processes_are_replaced(tmp_path):
    engine = IsolatedEngine(partial(TellingEngine, tmp_path))
    futures = [engine.submit(Request(str(k), SEGV if k in (1, 50) else "")) for k in range(100)]
    engine.close()
    assert all(future.done() for future in futures)
    assert sum(future.exception() is None for future in futures) == 98
    assert isinstance(engine.submit(Request("late")).exception(5), EngineError)
    assert all(ends(pid) for pid in pids(tmp_path))


def test_the_process_ends_with_its_parent_even_in_a_native_hang(tmp_path):
    held = tmp_path / "held"
    os.mkfifo(held)
    code = (
        "import sys, pathlib; from functools import partial\n"
        f"from {__name__} import Request, TellingEngine; from qwen_ray.engines.isolated import IsolatedEngine\n"
        "engine = IsolatedEngine(partial(TellingEngine, pathlib.Path(sys.argv[1])))\n"
        "engine.submit(Request('k', f'hold {sys.argv[2]}')).result()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(held)]) as parent:
        assert held.read_text() == "held"
        (child,) = pids(tmp_path)
        os.kill(child, 0)
        parent.kill()
    assert ends(child)


def test_the_record_holds_two_steps_and_one_that_was_cut_off_is_none():
    fd = os.memfd_create("journal")
    assert journal.read(fd) == (0.0, frozenset())
    book = journal.Journal(fd)
    book.step(["a", "b"])
    book.arriving("c")
    at_s, keys = journal.read(fd)
    assert keys == {"a", "b", "c"}
    assert 0 < at_s <= time.monotonic()
    book.arriving()
    book.step(["b", "d"])
    assert journal.read(fd)[1] == {"a", "b", "d"}
    book.step([])
    book.step([])
    assert journal.read(fd)[1] == frozenset()  # shorter than what it replaced
    os.pwrite(fd, b"\0", journal.HEAD.size)
    assert journal.read(fd) == (0.0, frozenset())
    os.close(fd)
