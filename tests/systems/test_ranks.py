"""Several ranks, as threads: the bits of one rank that accumulates all ranks' micro-batches (the oracle)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.memory.pool import OutOfMemoryError
from systems.errors import UnsupportedError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.settings import Settings
from systems.system import Engine
from tests.planning.races import find_races
from tests.systems import models_small
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as build_plain
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import RESIDENT, Run, assert_equal, elixir, finished, managed, one_step, settings, start
from tests.systems.test_ordering import as_issued

STEPS = 3
LARGE = 1 << 30
