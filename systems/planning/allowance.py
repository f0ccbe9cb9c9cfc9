"""What the allocator of real device memory takes beyond the bytes that a plan adds up.

Note [Allowance]
    Plans count tensors. On a GPU the pool lies in one slab, with holes between blocks of different sizes, and activations come
    from torch's allocator, which rounds them up and keeps what it cannot place again. So plans fill a part of the budget only,
    and the peak that is to be expected is that of the slab beside the highest activations, with a share on top. A slab keeps
    its bytes while its blocks are few: what a plan lets activations have at one moment and blocks at another has to fit
    side by side. The emulated device counts exactly and allows for nothing.

    On several ranks reductions have room of their own on the device, beside the pool and activations, from the beginning to
    the end (systems/ranks/staging.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from systems.ranks.staging_size import MOST_BYTES


@dataclass(frozen=True)
class Allowance:
    """reserve_share: of a budget, what plans leave free, at least least_reserve and at most most_reserve (bytes), and at most
    half of it.

    slack_share: of the pool's peak, at least one and at most two of its largest blocks, for which a hole must be found.
    slack_of_reserve: of what plans leave free, the most that this may be. growth_share: of slab and activations together,
    what the allocator reserves beyond them. least_growth: bytes that this is at least, or an eighth of a smaller budget.
    warm_up_share: of what plans may fill, what model data takes while there is none. staging_share: of a budget, what
    reductions of several ranks have, at most MOST_BYTES; `on` says of how many.
    """

    reserve_share: float = 0.0
    least_reserve: int = 0
    most_reserve: int = 1 << 62
    slack_share: float = 0.0
    slack_of_reserve: float = 0.0
    growth_share: float = 0.0
    least_growth: int = 0
    warm_up_share: float = 1.0
    staging_share: float = 0.0
    ranks: int = 1

    def on(self, ranks: int) -> Allowance:
        """The same device as one of so many ranks'."""
        return replace(self, ranks=ranks) if self.staging_share else self

    def staging(self, budget: int) -> int:
        """Bytes of a budget that reductions have."""
        return min(int(budget * self.staging_share), MOST_BYTES) if self.ranks > 1 else 0

    def plannable(self, budget: int) -> int:
        """Bytes of a budget that a plan may fill."""
        return self._plannable(budget - self.staging(budget))

    def _plannable(self, shared: int) -> int:
        reserve = max(min(int(shared * self.reserve_share), self.most_reserve), self.least_reserve)
        return max(shared - reserve, shared // 2)

    def budget_for(self, nbytes: int) -> int:
        """The smallest budget that lets a plan fill nbytes."""
        return bisect_left(range(4 * nbytes), nbytes, key=self.plannable)

    def slab(self, pool_bytes: int, largest: int, budget: int) -> int:
        """Bytes for a pool that holds pool_bytes at once. largest: bytes of its largest block that moves."""
        slack = min(2 * largest, max(largest, int(pool_bytes * self.slack_share)))
        shared = budget - self.staging(budget)
        return pool_bytes + min(slack, int((shared - self._plannable(shared)) * self.slack_of_reserve))

    def warm_up_pool(self, settled: int, movable: int, plannable: int, share: float | None) -> int:
        """Bytes of a pool for steps without a plan, beside activations that are not known yet.

        settled: of what is there and stays. movable: parameters of all else; as much again would do for their gradients.
        share: a strategy's own warm_up_share.
        """
        share = self.warm_up_share if share is None else share
        return settled + min(int(share * max(plannable - settled, 0)), 2 * movable)

    def beside(self, others: int, budget: int) -> int:
        """Bytes of a budget that a pool may take beside a peak of others; half of its growth is left to the allocator."""
        shared = budget - self.staging(budget)
        return min(int(shared / (1 + self.growth_share / 2)), shared - self._least_growth(shared)) - others

    def expected_peak(self, slab: int, others: int, budget: int) -> int:
        """Bytes that the allocator will have reserved for a slab and a peak of others, where it is not short of them."""
        total, staging = slab + others, self.staging(budget)
        grown = max(int(total * (1 + self.growth_share)), total + self._least_growth(budget - staging))
        return staging + min(grown, max(budget - staging, total))

    def _least_growth(self, shared: int) -> int:
        return min(self.least_growth, shared // 8)


EXACT = Allowance()
CUDA = Allowance(
    reserve_share=0.08,
    least_reserve=192 << 20,
    most_reserve=3 << 30,
    slack_share=0.03,
    slack_of_reserve=0.75,
    growth_share=0.06,
    least_growth=64 << 20,
    warm_up_share=0.2,
    staging_share=1 / 8,
)
"""warm_up_share: PatrickStar section 7.3. growth_share: reserved over allocated bytes was 1.005 to 1.047 on an H100 with
segments that grow (opt-1.3b, ps-4b). most_reserve: in 120 records of full devices, of all sizes from 1 GiB to 79, the allocator
had at most 2.1 GiB beyond 92 % of its budget. least_growth: reserved less allocated bytes were 48 to 64 MiB on devices of 700
and 1024 MiB (opt-125m)."""
