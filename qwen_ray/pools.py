"""How a run divides what a cluster has: how many decoders and engines, and which engines share a card. Pure arithmetic.

Engines are placed card by card here, and Ray is held to it by a placement group: left to itself it fills cards with
what comes first, and four small engines on two cards can keep a large one from ever starting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from qwen_ray.config import CaptionConfig, JobConfig, SpeechConfig
from qwen_ray.errors import ConfigError

FUZZ = 1e-9
"""Shares are sums of decimal fractions; 0.7 + 0.3 fits on a card."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    num_cpus: float
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is to run on."""

    nodes: tuple[Node, ...]
    object_store_bytes: float = float(1 << 30)

    @property
    def num_cpus(self) -> float:
        """Cores of all nodes."""
        return sum(node.num_cpus for node in self.nodes)

    @property
    def num_gpus(self) -> int:
        """Cards of all nodes."""
        return sum(node.num_gpus for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Pool:
    """`size` actors, each with these shares."""

    size: int
    num_cpus: float
    num_gpus: float = 0.0


@dataclass(slots=True)
class Card:
    """A card, or all cards of an engine that needs several, and the engines on it."""

    node: int
    num_gpus: float
    free: float
    engines: list[str] = field(default_factory=list)
    """`caption` or `speech`, one entry per engine."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The actors of a run; a stage that is switched off has none. `cards` holds the engines that use a GPU."""

    decode: Pool
    caption: Pool | None
    speech: Pool | None
    cards: tuple[Card, ...] = ()

    def engines(self) -> Iterator[tuple[str, Pool]]:
        """The pools of engines by name."""
        for name, pool in (("caption", self.caption), ("speech", self.speech)):
            if pool is not None:
                yield name, pool

    def homes(self, name: str) -> list[int]:
        """For each engine of a pool, the index of its card."""
        return [index for index, card in enumerate(self.cards) for engine in card.engines if engine == name]

    def shares(self, card: Card) -> dict[str, float]:
        """What the engines of a card ask for, in Ray's words."""
        pools = dict(self.engines())
        on_it = [pools[name] for name in card.engines]
        return {"GPU": sum(pool.num_gpus for pool in on_it), "CPU": sum(pool.num_cpus for pool in on_it)}


def plan_pools(config: JobConfig, cluster: Cluster) -> Pools:
    """Actors for what `cluster` has.

    With GPUs, each holds as many pairs of engines as their shares allow; without, engines take about half of the
    cores. Decoders get the cores that are left. Where even one actor of each kind asks for more cores than there are,
    all shares shrink alike (Ray's cores are a budget, not a fence).

    Raises:
        ConfigError: a fixed number of replicas, or one engine of each kind, does not fit. Ray would wait for half an
        hour.
    """
    if cluster.num_cpus <= 0:
        raise ConfigError("the cluster has no CPU cores: is any node up? (ray status)")
    caption = _engine_pool(config.caption, config, cluster)
    speech = _engine_pool(config.speech, config, cluster)
    pools = Pools(Pool(0, config.decode.num_cpus), caption, speech)
    return _with_decoders(replace(pools, cards=_placed(pools, cluster)), config, cluster)


def _engine_pool(engine: CaptionConfig | SpeechConfig | None, config: JobConfig, cluster: Cluster) -> Pool | None:
    if engine is None:
        return None
    if not cluster.num_gpus:
        return Pool(engine.replicas or max(1, int(cluster.num_cpus // 4)), engine.num_cpus)
    pairs = sum(_pairs_on(node, config) for node in cluster.nodes)
    return Pool(engine.replicas or max(1, pairs), engine.num_cpus, float(engine.num_gpus))


def _pairs_on(node: Node, config: JobConfig) -> int:
    """Engines of each kind that the cards of a node hold."""
    shares = [float(part.num_gpus) for part in (config.caption, config.speech) if part and part.num_gpus]
    if sum(shares) <= 1 + FUZZ:
        return node.num_gpus * math.floor(1 / sum(shares) + FUZZ) if shares else 1
    return max(k for k in range(node.num_gpus + 1) if sum(_cards_for(k, s) for s in shares) <= node.num_gpus)


def _cards_for(engines: int, share: float) -> int:
    """Whole cards that so many engines fill when they share them with no others."""
    return math.ceil(engines * share) if share >= 1 else math.ceil(engines / math.floor(1 / share + FUZZ))


def _placed(pools: Pools, cluster: Cluster) -> tuple[Card, ...]:
    """Every engine that uses a GPU on a card: spread evenly if that works out, else as tightly as possible."""
    engines = [(pool.num_gpus, name) for name, pool in pools.engines() for _ in range(pool.size) if pool.num_gpus]
    engines.sort(reverse=True)
    for tightly in (False, True):
        cards = _pack(engines, cluster.nodes, tightly=tightly)
        if cards is not None:
            return tuple(card for card in cards if card.engines)
    pools_on = [(name, pool) for name, pool in pools.engines() if pool.num_gpus]
    asked = " + ".join(f"{name} {pool.size} x {pool.num_gpus:g}" for name, pool in pools_on)
    settings = ", ".join(f"{name}.num_gpus" for name, _ in pools_on)
    nodes = " + ".join(f"{node.num_gpus}" for node in cluster.nodes if node.num_gpus)
    needed = sum(pool.size * pool.num_gpus for _, pool in pools_on)
    raise ConfigError(
        f"{settings}: the engines ask for {needed:g} GPUs ({asked}), which do not fit on the cluster's "
        f"{cluster.num_gpus} (by node: {nodes}); lower the shares or the replicas, or add GPUs"
    )


def _pack(engines: Sequence[tuple[float, str]], nodes: Sequence[Node], *, tightly: bool) -> list[Card] | None:
    """Engines, largest first, on cards; None where one finds no place."""
    cards = [Card(index, 1.0, 1.0) for index, node in enumerate(nodes) for _ in range(node.num_gpus)]
    for share, name in engines:
        home = _whole_cards(cards, share) if share > 1 else _one_card(cards, share, tightly=tightly)
        if home is None:
            return None
        home.engines.append(name)
        home.free -= share
    return cards


def _one_card(cards: Sequence[Card], share: float, *, tightly: bool) -> Card | None:
    fitting = [card for card in cards if card.free >= share - FUZZ]
    choose = min if tightly else max
    return choose(fitting, key=lambda card: card.free, default=None)


def _whole_cards(cards: list[Card], count: float) -> Card | None:
    """Empty cards of one node made into one for an engine that needs them all."""
    empty = [card for card in cards if card.free == card.num_gpus == 1]
    for node in sorted({card.node for card in empty}):
        together = [card for card in empty if card.node == node][: int(count)]
        if len(together) == count:
            cards[:] = [card for card in cards if not any(card is one for one in together)]
            cards.append(Card(node, count, count))
            return cards[-1]
    return None


def _with_decoders(pools: Pools, config: JobConfig, cluster: Cluster) -> Pools:
    """The pools with decoders on the cores that the engines leave, and all shares of cores shrunk to what there is."""
    decode, on_node = config.decode, [0.0] * len(cluster.nodes)
    for card in pools.cards:
        on_node[card.node] += pools.shares(card)["CPU"]
    anywhere = sum(pool.size * pool.num_cpus for _, pool in pools.engines() if not pool.num_gpus)
    left = [max(0.0, node.num_cpus - taken) for node, taken in zip(cluster.nodes, on_node, strict=True)]
    automatic = sum(int(cores / decode.num_cpus + FUZZ) for cores in left) if decode.num_cpus else len(left)
    if decode.num_cpus:
        automatic -= math.ceil(anywhere / decode.num_cpus - FUZZ)
    size = decode.replicas or max(1, automatic)
    needed = sum(on_node) + anywhere + size * decode.num_cpus
    if _is_fixed(config) and needed > cluster.num_cpus + FUZZ:
        raise ConfigError(
            f"replicas: decode {size} x {decode.num_cpus:g} and engines ask for {needed:g} CPU cores and the cluster "
            f"has {cluster.num_cpus:g}; lower the replicas or num_cpus"
        )
    full = [node.num_cpus / taken for node, taken in zip(cluster.nodes, on_node, strict=True) if taken > 0]
    shrink = min(1.0, cluster.num_cpus / needed if needed else 1.0, *full)

    def fitted(pool: Pool | None) -> Pool | None:
        return pool and replace(pool, num_cpus=math.floor(pool.num_cpus * shrink * 100) / 100)

    decoders = Pool(size, math.floor(decode.num_cpus * shrink * 100) / 100)
    return replace(pools, decode=decoders, caption=fitted(pools.caption), speech=fitted(pools.speech))


def _is_fixed(config: JobConfig) -> bool:
    return bool(config.decode.replicas or any(part and part.replicas for part in (config.caption, config.speech)))
