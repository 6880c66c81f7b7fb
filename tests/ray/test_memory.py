"""A decoder that outruns its engine waits for it: bytes in flight stay under their bound, and nothing spills."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.ray.test_run import films

STORE_MIB = 200
RUN = """
import json, re, sys, threading
import ray, qwen_ray
from ray._private.internal_api import memory_summary

store, source, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store << 20)
address, peak_mib, over = ray.get_runtime_context().gcs_address, 0.0, threading.Event()

def watch():
    global peak_mib
    while not over.wait(0.3):
        used = re.search(r"Plasma memory usage (\\d+) MiB", memory_summary(address, stats_only=True))
        peak_mib = max(peak_mib, float(used[1]))

watcher = threading.Thread(target=watch)
watcher.start()
settings = ["speech=null", "decode.window_s=0.4", "decode.num_frames=16", "decode.max_pixels=230400"]
report = qwen_ray.run(qwen_ray.configure(source, output, preset="tiny", set=settings))
over.set()
watcher.join()
spilled = "Spilled" in memory_summary(address, stats_only=True)
print(json.dumps({"clips": report.clips, "peak_mib": peak_mib, "spilled": spilled}))
"""


def test_a_slow_engine_holds_the_decoder_back(tmp_path):
    arguments = [str(STORE_MIB), str(films()["bikes"]), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["clips"] == {"ok": 25}  # of some 9 MiB each: more than the store holds
    assert not seen["spilled"]
    assert 10 < seen["peak_mib"] <= 0.6 * STORE_MIB  # Ray spills from 0.8 on
