"""Damaged files of many kinds through the decode stage: each becomes its row, none is a bug or takes for ever."""

import pytest

from jobs.conformance import bases
from jobs.conformance.fuzz import Tester, Totals
from jobs.conformance.mutations import Mutant, mutant, structure
from qwen_ray.media.container import PacketReader


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return bases.render(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def tester(tmp_path):
    tester = Tester(tmp_path)
    yield tester
    tester.close()


def test_every_undamaged_file_gives_its_frames(sound, tester):
    for number, (name, data) in enumerate(sound.items()):
        outcome = tester.check(Mutant(3 * number, name, "none", data))
        assert (outcome.status, outcome.has_frames, outcome.fault, outcome.restarted) == ("ok", True, "", False), name


def test_damaged_files_become_rows(sound, tester):
    totals = Totals()
    for number in range(300):
        totals.add(tester.check(mutant(sound, 0, number)))
    assert totals.faults == []
    assert totals.files == 300
    assert totals.with_frames >= 0.3 * totals.files
    assert len(totals.outcomes) >= 5  # the damage is of more than one kind


def test_a_damaged_file_can_be_made_again(sound):
    assert mutant(sound, 0, 7) == mutant(sound, 0, 7)
    made = [mutant(sound, 0, number) for number in range(40)]
    assert sum(one.data != sound[one.base] for one in made) >= 36
    assert len({one.data for one in made}) >= 36


@pytest.mark.parametrize("name", sorted(bases.BASES))
def test_the_structure_of_a_file_covers_it(sound, name):
    data = sound[name]
    top = [element for element in structure(data).elements if not element.parents]
    assert sum(element.end - element.start for element in top) >= len(data) - 32
    assert len(structure(data).elements) >= 10


class LateStreams:
    """PyAV over a file in which a stream turns up late: at its end it looks for a stream that it does not have."""

    size = 1000

    def __init__(self, packets):
        self._packets = iter(packets)

    def demux(self, *streams):
        yield from self._packets
        raise IndexError("list index out of range")


class Packet:
    size = 10


def test_a_stream_that_turns_up_late_is_no_error():
    reader = PacketReader(LateStreams([Packet()] * 5), None)
    assert len(list(reader)) == 5
    assert reader.num_errors == 0
