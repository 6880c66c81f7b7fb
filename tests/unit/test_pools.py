"""How a run divides what a cluster has."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_ray.config import PRESETS, JobConfig, preset, set_paths
from qwen_ray.errors import ConfigError
from qwen_ray.pools import Cluster, Node, plan_pools


def _job(*assignments):
    return set_paths(preset("tiny"), ["caption.num_gpus=0.7", "speech.num_gpus=0.25", *assignments])


def _nodes(count, num_cpus, num_gpus=0):
    return Cluster((Node(num_cpus, num_gpus),) * count)


def _cpus(pools):
    return sum(pool.size * pool.num_cpus for pool in (pools.decode, pools.caption, pools.speech) if pool)


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 8, 64])
def test_a_laptop_without_gpu_is_filled_and_never_overbooked(num_cpus):
    pools = plan_pools(_job(), _nodes(1, num_cpus))
    assert min(pools.decode.size, pools.caption.size, pools.speech.size) >= 1
    assert pools.caption.num_gpus == pools.speech.num_gpus == 0
    assert 0.5 * num_cpus <= _cpus(pools) <= num_cpus


@pytest.mark.parametrize(
    ("cluster", "num_gpus"), [(_nodes(1, 16, 1), 1), (_nodes(2, 16, 1), 2), (_nodes(32, 128, 8), 256)], ids=str
)
def test_every_gpu_holds_one_pair_of_engines(cluster, num_gpus):
    pools, engines = plan_pools(_job(), cluster), num_gpus
    assert [sorted(card.engines) for card in pools.cards] == [["caption", "speech"]] * num_gpus
    assert all(pools.shares(card)["GPU"] == pytest.approx(0.95) for card in pools.cards)
    assert (pools.caption.size, pools.speech.size) == (engines, engines)
    assert (pools.caption.num_gpus, pools.speech.num_gpus) == (0.7, 0.25)
    assert pools.decode.size * pools.decode.num_cpus >= 0.5 * 16 * num_gpus


@pytest.mark.parametrize("num_gpus", [1, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_on_any_number_of_gpus(name, num_gpus):
    job = preset(name)
    if num_gpus < job.caption.num_gpus:
        with pytest.raises(ConfigError, match=r"caption\.num_gpus"):
            plan_pools(job, _nodes(1, 16 * num_gpus, num_gpus))
        return
    pools = plan_pools(job, _nodes(1, 16 * num_gpus, num_gpus))
    share = job.caption.num_gpus + job.speech.num_gpus
    pairs = num_gpus // share if share > 1 else num_gpus * int(1 / share)
    assert (pools.caption.size, pools.speech.size) == (pairs, pairs)


@pytest.mark.parametrize("num_gpus", [1, 4, 8])
def test_the_defaults_fit(num_gpus):
    assert plan_pools(JobConfig(), _nodes(1, 16 * num_gpus, num_gpus)).caption.size == num_gpus


def test_small_shares_put_several_pairs_on_a_gpu():
    pools = plan_pools(_job("caption.num_gpus=0.25", "speech.num_gpus=0.25"), _nodes(1, 16, 1))
    assert (pools.caption.size, pools.speech.size) == (2, 2)


@pytest.mark.parametrize(
    ("assignments", "cluster", "words"),
    [
        (["caption.num_gpus=0.9"], _nodes(1, 8, 1), ["caption.num_gpus", "1.15", "1"]),
        (["caption.replicas=3"], _nodes(1, 8, 2), ["caption 3 x 0.7", "2"]),
        (
            ["caption.replicas=3", "caption.num_gpus=0.6", "speech=null"],
            _nodes(1, 8, 2),
            ["caption 3 x 0.6", "fit"],
        ),
        (["decode.replicas=100"], _nodes(1, 8), ["decode 100 x 1", "8"]),
        ([], Cluster(()), ["no CPU"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(assignments, cluster, words):
    with pytest.raises(ConfigError) as raised:
        plan_pools(_job(*assignments), cluster)
    for word in words:
        assert word in str(raised.value)


def test_a_stage_that_is_off_has_no_pool():
    pools = plan_pools(_job("speech=null"), _nodes(1, 4))
    assert pools.speech is None


def _engines(pools):
    return sorted(sorted(card.engines) for card in pools.cards)


@pytest.mark.parametrize(
    ("assignments", "cluster", "engines"),
    [
        (["caption.replicas=1", "speech.replicas=4"], _nodes(1, 8, 2), [["caption", "speech"], ["speech"] * 3]),
        (["caption.replicas=2", "speech.replicas=4"], _nodes(1, 16, 3), None),
        (["caption.num_gpus=0.3", "speech.num_gpus=0.2"], _nodes(1, 16, 2), [["caption"] * 2 + ["speech"] * 2] * 2),
        (["caption.num_gpus=1", "speech.num_gpus=0.25"], _nodes(1, 64, 8), [["caption"]] * 6 + [["speech"] * 3] * 2),
        (["caption.num_gpus=4", "speech.num_gpus=0"], _nodes(1, 64, 8), [["caption"]] * 2),
        (["caption.num_gpus=4", "speech.num_gpus=0"], _nodes(2, 64, 6), [["caption"]] * 2),
        (["caption.num_gpus=4", "speech.num_gpus=0.25"], _nodes(1, 64, 8), [["caption"], ["speech"]]),
        (["caption.replicas=2", "caption.num_gpus=0.5", "speech=null"], _nodes(1, 8, 2), [["caption"]] * 2),
    ],
)
def test_engines_are_placed_card_by_card(assignments, cluster, engines):
    pools = plan_pools(_job(*assignments), cluster)
    if engines is not None:
        assert _engines(pools) == sorted(engines)
    placed = [engine for card in pools.cards for engine in card.engines]
    for name, pool in pools.engines():
        assert placed.count(name) == (pool.size if pool.num_gpus else 0)
        assert [pools.cards[home].engines.count(name) > 0 for home in pools.homes(name)] == [True] * len(
            pools.homes(name)
        )
    assert all(pools.shares(card)["GPU"] <= card.num_gpus + 1e-9 for card in pools.cards)


@given(
    nodes=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 8)), min_size=1, max_size=5),
    caption=st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 0.85, 1, 2, 4]),
    speech=st.sampled_from([None, 0, 0.05, 0.1, 0.25, 0.4]),
)
def test_a_plan_never_asks_for_more_than_a_node_has(nodes, caption, speech):
    cluster = Cluster(tuple(Node(cpus, gpus) for cpus, gpus in nodes))
    share = "speech=null" if speech is None else f"speech.num_gpus={speech}"
    job, most = _job(f"caption.num_gpus={caption}", share), max(node.num_gpus for node in cluster.nodes)
    cards = sum(node.num_gpus for node in cluster.nodes)  # the two may sit on different nodes
    if most and (math.ceil(caption) > most or math.ceil(caption + (speech or 0)) > cards):
        with pytest.raises(ConfigError, match="num_gpus"):
            plan_pools(job, cluster)
        return
    pools = plan_pools(job, cluster)
    for index, node in enumerate(cluster.nodes):
        mine = [pools.shares(card) | {"cards": card.num_gpus} for card in pools.cards if card.node == index]
        assert sum(share["cards"] for share in mine) <= node.num_gpus
        assert sum(share["CPU"] for share in mine) <= node.num_cpus + 1e-9
    assert _cpus(pools) <= cluster.num_cpus + 1e-9
