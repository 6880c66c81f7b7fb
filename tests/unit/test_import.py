"""What importing the package costs and loads."""

import json
import subprocess
import sys

import qwen_ray


def _fresh(code: str) -> dict:
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_importing_the_package_is_quick_and_loads_neither_torch_nor_ray():
    code = (
        "import json, sys, time; began = time.perf_counter(); import qwen_ray; took_s = time.perf_counter() - began\n"
        "heavy = sorted({'torch', 'ray', 'transformers', 'av', 'pyarrow'} & set(sys.modules))\n"
        "print(json.dumps({'took_s': took_s, 'heavy': heavy}))"
    )
    runs = [_fresh(code) for _ in range(3)]
    assert runs[0]["heavy"] == []
    assert min(run["took_s"] for run in runs) < 0.3


def test_importing_the_stages_loads_no_ray():
    code = (
        "import json, sys; import qwen_ray.stages.decode, qwen_ray.stages.caption, qwen_ray.stages.transcribe\n"
        "print(json.dumps(sorted({'torch', 'ray'} & set(sys.modules))))"
    )
    assert _fresh(code) == []


def test_every_public_name_is_there():
    for name in qwen_ray.__all__:
        assert getattr(qwen_ray, name) is not None
    assert set(qwen_ray.__all__) == set(qwen_ray._HOME)
