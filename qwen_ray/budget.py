"""What a run may take: time, and money by the hours of the cluster that it runs on."""

from __future__ import annotations

import time

from qwen_ray.config import BudgetConfig
from qwen_ray.errors import BudgetSpentError
from qwen_ray.pools import Cluster


class Budget:
    """Counts from when it is made; hours of the cluster, from when `runs_on` is told."""

    def __init__(self, config: BudgetConfig) -> None:
        self._config, self._started = config, time.monotonic()
        self._joined = self._started
        self._num_gpus, self._hour_price = 0, 0.0

    def runs_on(self, cluster: Cluster) -> None:
        """From now on the run has these machines."""
        self._joined, self._num_gpus = time.monotonic(), cluster.num_gpus
        self._hour_price = (
            cluster.num_gpus * self._config.gpu_hour_price + cluster.num_cpus * self._config.cpu_hour_price
        )

    def spent(self) -> tuple[float, float, float]:
        """(seconds since the start, hours of GPUs, cost) so far."""
        now = time.monotonic()
        hours = (now - self._joined) / 3600
        return now - self._started, self._num_gpus * hours, self._hour_price * hours

    def check(self) -> None:
        """Raises BudgetSpentError once a bound is reached."""
        elapsed_s, _, cost = self.spent()
        if 0 < self._config.max_hours * 3600 <= elapsed_s:
            raise BudgetSpentError(f"stopped after {elapsed_s / 3600:.2f} hours (budget.max_hours)")
        if 0 < self._config.max_cost <= cost:
            raise BudgetSpentError(f"stopped after a cost of {cost:.2f} (budget.max_cost)")
