"""How far a run is, while it runs: on a terminal one line that is written over, elsewhere a line each time the run tells."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

WINDOW = 8  # tellings that the speed is taken from: half a second apart, or a step each where steps are longer


class StepLine:
    """tokens_per_step: of all ranks, once it is known. clock: seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens_per_step: int | None = None
        self._console, self._clock = console, clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._live: Live | None = None

    @property
    def moves(self) -> bool:
        """Whether a line can be written over."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def tell(self, line: str) -> None:
        """A line that stays, above the one that moves."""
        self._console.print(line, markup=False)

    def step(self, done: int, steps: int, loss: float | None) -> None:
        said = f"step {done}/{steps}" + ("" if loss is None else f"  loss {loss:.4f}")
        if not self.moves:
            self.tell(said)
            return
        self._seen.append((self._clock(), done))
        line = Text("  ".join([said, *self._speed(done, steps)]), overflow="ellipsis", no_wrap=True)
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(line, refresh=True)

    def _speed(self, done: int, steps: int) -> list[str]:
        """By the last tellings; nothing before there are two."""
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last <= first or last_s <= first_s:
            return []
        step_s = (last_s - first_s) / (last - first)
        found = [f"{step_s:.3g} s/step"]
        if self.tokens_per_step is not None:
            found.append(f"{self.tokens_per_step / step_s:,.0f} tokens/s")
        return [*found, f"{timedelta(seconds=round((steps - done) * step_s))} left"]

    def close(self) -> None:
        """The line that moves goes. Safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
