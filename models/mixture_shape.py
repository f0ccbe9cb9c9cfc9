"""What a shape with mixtures of experts adds, for every family that has some. The layer: `models.moe`."""

from __future__ import annotations

from dataclasses import dataclass

CHOICES = (1, 2)
MAX_BALANCE = 1.0
FROM_ZERO = frozenset({"expert_rank"})  # and not to be set


@dataclass(frozen=True, kw_only=True)
class MixtureFields:
    """A part of a shape, with no shape of its own.

    experts: of each mixture, of all ranks. choices: experts that a token goes to, 1 or 2.

    capacity_factor: slots of an expert over its even share of the tokens, whatever `choices`: below 2 some of two choices are
    always dropped. balance_weight: of the load-balancing loss in the loss, for each mixture.
    expert_ranks: ranks among which the experts of a mixture are divided; 1: every rank has all. expert_rank: which of them
    the model is built for, 0 first; set by who builds it.
    """

    experts: int
    choices: int = 1
    capacity_factor: float = 1.25
    balance_weight: float = 0.01
    expert_ranks: int = 1
    expert_rank: int = 0

    def check_mixtures(self, name: str) -> None:
        """Raises ValueError, one line, for what cannot be."""
        if self.choices not in CHOICES:
            raise ValueError(f"{name}: choices must be 1 or 2, not {self.choices}")
        if self.choices > self.experts:
            raise ValueError(f"{name}: choices {self.choices} are more than its experts ({self.experts})")
        if not 0.0 < self.capacity_factor <= 2 * self.experts:
            raise ValueError(
                f"{name}: capacity_factor must be above 0 and at most {2 * self.experts}, twice the experts (with as many as "
                f"there are nothing is dropped), not {self.capacity_factor}"
            )
        if not 0.0 <= self.balance_weight <= MAX_BALANCE:
            raise ValueError(f"{name}: balance_weight must lie in [0, {MAX_BALANCE:g}], not {self.balance_weight}")
        if self.experts % self.expert_ranks:
            raise ValueError(
                f"{name}: expert_ranks {self.expert_ranks} does not divide its {self.experts} experts: set it to a number "
                "that does"
            )
        if self.expert_rank >= self.expert_ranks:
            raise ValueError(f"{name}: expert_rank must lie in [0, {self.expert_ranks}), not {self.expert_rank}")

    def here(self, experts: int) -> range:
        """Global numbers of the experts of a mixture that are built: `experts` of all ranks."""
        mine = experts // self.expert_ranks
        return range(self.expert_rank * mine, (self.expert_rank + 1) * mine)


def divided_among(shape: object) -> int:
    """Ranks that each have other experts of the model: 1 where all have all that there are."""
    return shape.expert_ranks if isinstance(shape, MixtureFields) else 1
