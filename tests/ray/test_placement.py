"""Engines share cards as planned, in whole runs on clusters whose GPUs are pretended; each cluster is a process's own.

The fake engines note which card Ray gave them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_ray.api import SAMPLES

SCRIPT = """
import json, os, sys
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
import ray, ray.util
facts = json.loads(sys.argv[1])
if len(facts["nodes"]) == 1:
    cpus, gpus = facts["nodes"][0]
    ray.init(address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
else:
    from ray.cluster_utils import Cluster
    cluster = Cluster()
    for cpus, gpus in facts["nodes"]:
        cluster.add_node(num_cpus=cpus, num_gpus=gpus)
    ray.init(cluster.address, log_to_driver=False)
import qwen_ray
job = qwen_ray.configure(facts["input"], facts["output"], preset="tiny", set=facts["set"])
blocker = ray.remote(num_gpus=facts.get("taken", 0))(type("Blocker", (), {"ready": lambda self: 1}))
if "taken" in facts:
    held = blocker.remote()
    ray.get(held.ready.remote())
try:
    result = {"videos": qwen_ray.run(job).videos}
    everything = ray.util.placement_group([{"GPU": gpus} for _, gpus in facts["nodes"]])
    ray.get(everything.ready(), timeout=60)  # nothing stays reserved
except qwen_ray.ConfigError as error:
    result = {"error": str(error)}
with open(facts["result"], "w") as file:  # Ray's own words go to standard output
    json.dump(result, file)
ray.shutdown()
if len(facts["nodes"]) > 1:
    cluster.shutdown()
"""


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A short path of its own: clusters note their addresses in it, and sockets in it bear 107 characters."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _run(ray_folder: Path, output: Path, nodes: list[tuple[int, int]], *settings: str, **more: object):
    cards = output / "cards"
    cards.mkdir(parents=True)
    fake = [f"{part}.{name}" for part in ("caption", "speech") for name in ("engine=fake", f"model=card:{cards}")]
    facts = {"input": str(SAMPLES), "output": str(output / "out"), "nodes": nodes, "set": [*fake, *settings], **more}
    facts["result"] = str(output / "result.json")
    environment = os.environ | {"RAY_TMPDIR": str(ray_folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(facts)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    placed = sorted((path.name.partition("-")[0], path.read_text()) for path in cards.iterdir())
    return json.loads((output / "result.json").read_text()), placed


@pytest.mark.parametrize(
    ("nodes", "settings", "together"),
    [
        ([(6, 2)], ["caption.num_gpus=0.7", "speech.num_gpus=0.25"], [["caption", "speech"]] * 2),
        (
            [(8, 2)],
            ["caption.num_gpus=0.7", "speech.num_gpus=0.25", "caption.replicas=1", "speech.replicas=4"],
            [["caption", "speech"], ["speech"] * 3],
        ),
        ([(16, 4)], ["caption.num_gpus=0.7", "speech.num_gpus=0.25"], [["caption", "speech"]] * 4),
        (
            [(16, 2)],
            ["caption.num_gpus=0.3", "speech.num_gpus=0.2"],
            [["caption", "caption", "speech", "speech"]] * 2,
        ),
        (
            [(16, 4)],
            ["caption.num_gpus=2", "speech.num_gpus=0.25", "caption.replicas=1", "speech.replicas=8"],
            [["caption"], ["speech"] * 4, ["speech"] * 4],
        ),
        ([(4, 2), (4, 2)], ["caption.num_gpus=0.7", "speech.num_gpus=0.25"], [["caption", "speech"] * 2] * 2),
    ],
    ids=["2 GPUs", "four small engines", "4 GPUs", "two pairs a card", "an engine on two", "two nodes"],
)
def test_every_engine_sits_on_its_card(ray_folder, tmp_path, nodes, settings, together):
    result, placed = _run(ray_folder, tmp_path, nodes, *settings)
    assert result == {"videos": {"ok": 4}}
    by_card = defaultdict(list)
    for engine, cards in placed:
        by_card[cards].append(engine)
    assert sorted(map(sorted, by_card.values())) == sorted(map(sorted, together))  # both nodes number theirs from 0


def test_cards_that_another_job_holds_are_named_and_nothing_is_written(ray_folder, tmp_path):
    result, placed = _run(ray_folder, tmp_path, [(4, 1)], "caption.num_gpus=0.7", "speech.num_gpus=0.25", taken=0.5)
    assert placed == []
    for words in ("GPUs are in use", "0.95 GPU", "0.5 GPU"):
        assert words in result["error"]
    assert not list((tmp_path / "out").glob("videos/*"))
