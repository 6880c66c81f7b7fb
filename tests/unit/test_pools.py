"""How a run divides what a cluster has."""

import pytest

from qwen_ray.config import PRESETS, JobConfig, preset, set_paths
from qwen_ray.errors import ConfigError
from qwen_ray.pipeline import plan_pools


def _job(*assignments):
    return set_paths(preset("tiny"), ["caption.num_gpus=0.7", "speech.num_gpus=0.25", *assignments])


def _cpus(pools):
    return sum(pool.size * pool.num_cpus for pool in (pools.decode, pools.caption, pools.speech) if pool)


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 8, 64])
def test_a_laptop_without_gpu_is_filled_and_never_overbooked(num_cpus):
    pools = plan_pools(_job(), {"CPU": num_cpus})
    assert min(pools.decode.size, pools.caption.size, pools.speech.size) >= 1
    assert pools.caption.num_gpus == pools.speech.num_gpus == 0
    assert 0.5 * num_cpus <= _cpus(pools) <= num_cpus


@pytest.mark.parametrize(("num_gpus", "engines"), [(1, 1), (2, 2), (256, 256)])
def test_every_gpu_holds_one_pair_of_engines(num_gpus, engines):
    pools = plan_pools(_job(), {"CPU": 16 * num_gpus, "GPU": num_gpus})
    assert (pools.caption.size, pools.speech.size) == (engines, engines)
    assert (pools.caption.num_gpus, pools.speech.num_gpus) == (0.7, 0.25)
    assert pools.decode.size * pools.decode.num_cpus >= 0.5 * 16 * num_gpus


@pytest.mark.parametrize("num_gpus", [1, 4, 8])
@pytest.mark.parametrize("job", [JobConfig(), *(make() for make in PRESETS.values())], ids=["default", *PRESETS])
def test_defaults_fit_on_any_number_of_gpus(job, num_gpus):
    assert plan_pools(job, {"CPU": 16 * num_gpus, "GPU": num_gpus}).caption.size >= num_gpus


def test_small_shares_put_several_pairs_on_a_gpu():
    pools = plan_pools(_job("caption.num_gpus=0.25", "speech.num_gpus=0.25"), {"CPU": 16, "GPU": 1})
    assert (pools.caption.size, pools.speech.size) == (2, 2)


@pytest.mark.parametrize(
    ("assignments", "cluster", "words"),
    [
        (["caption.num_gpus=0.9"], {"CPU": 8, "GPU": 1}, ["caption.num_gpus", "1.15", "1"]),
        (["caption.replicas=3"], {"CPU": 8, "GPU": 2}, ["caption 3 x 0.7", "2"]),
        (
            ["caption.replicas=3", "caption.num_gpus=0.6", "speech=null"],
            {"CPU": 8, "GPU": 2},
            ["caption 3 x 0.6", "fit"],
        ),
        (["decode.replicas=100"], {"CPU": 8}, ["decode 100 x 1", "8"]),
        ([], {}, ["no CPU"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(assignments, cluster, words):
    with pytest.raises(ConfigError) as raised:
        plan_pools(_job(*assignments), cluster)
    for word in words:
        assert word in str(raised.value)


def test_a_stage_that_is_off_has_no_pool():
    pools = plan_pools(_job("speech=null"), {"CPU": 4})
    assert pools.speech is None
