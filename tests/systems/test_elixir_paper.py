"""Elixir's variant paper as it trains: laws on the log of a whole run, which the default's breaks, and the bits of resident.

The first step of a run has no plan, and the laws hold there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.watch.events import EventLog
from systems.errors import BudgetError
from systems.planning.plan import Tier
from systems.planning.step.operations import LaneOperation, Work
from systems.strategies.elixir.options import ElixirOptions
from systems.strategies.elixir.strategy import Elixir
from tests.planning.races import find_races
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, elixir, managed, settings, start, train, train_as
from tests.systems.setups import STEPS, Setup, reference
from tests.systems.test_ordering import as_issued, assert_sound
from tests.systems.test_ranks import assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_ranks_matrix import CLIP, assert_as_it_should_be, half, shares
from tests.systems.test_shards import LANES, Last, assert_as_planned, assert_bytes_as_planned, plan_of

MODELS = ("opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny")
UPDATES = (Work.UPDATE, Work.UPDATE_AHEAD)
ONE, TWO = Setup("opt"), Setup("opt", "full", 2, clip=0.5)
CACHE = {ONE: 340 << 10, TWO: 480 << 10}  # bytes: of a block's 195 KiB, with what is held beside it


def paper(**more: Any) -> dict[str, Any]:
    return {"variant": "paper", **more}


def run(setup: Setup, share: float, options: Mapping[str, Any]) -> Run:
    """share: of what resident takes, on the device."""
    budget = int((reference(setup).memory.device_peak_bytes or 0) * share)
    found = setup.run(elixir(), budget, ElixirOptions(**options), log_events=True)
    assert_equal(reference(setup), found)
    return found


known = cache(lambda setup, share, options: run(setup, share, dict(options)))


def of_units(log: EventLog, begin: int = 0) -> Iterator[tuple[str, Any]]:
    """The log as ("hold" or "release", (way, unit)), ("fetch", bundle) and ("update", lane), in order of issue.

    begin: operations that came before.
    """
    for operation in log.operations[begin:]:
        what = operation.what
        if isinstance(what, LaneOperation):
            if what.kind is Work.FETCH:
                yield "fetch", what.bundle
            elif what.kind in UPDATES:
                yield "update", what.lane.value
        elif what.startswith(("hold for", "release by")):
            way, unit = what[what.index("(") + 1 : -1].split(", ")
            yield what.split()[0], (way.strip("'"), int(unit))
        elif what.startswith("update "):
            yield "update", "compute"


def fetch_waits(found: Run, most: int, begin: int = 0) -> bool:
    """What is fetched is what the next unit to be entered reads."""
    fetched, units = set[int](), managed(found.engine).layout.bundles_of_unit
    for what, who in of_units(managed(found.engine).log, begin):
        if what == "fetch":
            fetched.add(who)
        elif what == "release" and fetched:
            return False
        elif what == "hold":
            if not fetched <= set(units[who[1]]):
                return False
            fetched.clear()
    return not fetched


def update_waits(found: Run, most: int) -> bool:
    """Between an update and the next forward no backward goes on."""
    updated = False
    for what, who in of_units(managed(found.engine).log):
        if what == "update":
            updated = True
        elif what == "hold" and who[0] == "forward":
            updated = False
        elif what == "hold" and updated:
            return False
    return True


def gathered(found: Run) -> int:
    """The most bytes of chunks that come and go, and of their gradients, at any event; shards at rest apart."""
    engine = managed(found.engine)
    counted = {b.index for b in engine.layout.bundles if b.movable} - engine.strategy._staying
    labels = {f"{what}bundle {index}" for what in ("", "gradient of ") for index in counted}
    now = most = before = 0
    for event in engine.log.bytes:
        if event.tier == Tier.DEVICE.value:
            now += event.pool - before if event.label in labels else 0
            before, most = event.pool, max(most, now)
    return most


def cache_is_enough(found: Run, most: int) -> bool:
    return gathered(found) <= most


def host_updates(found: Run, most: int) -> bool:
    return {who for what, who in of_units(managed(found.engine).log) if what == "update"} == {"cpu"}


Law = Callable[[Run, int], bool]
LAWS: Mapping[str, Law] = MappingProxyType(
    {law.__name__: law for law in (fetch_waits, update_waits, cache_is_enough, host_updates)}
)


def broken(found: Run, most: int) -> set[str]:
    return {name for name, law in LAWS.items() if not law(found, most)}


@pytest.mark.parametrize("setup", [ONE, TWO], ids=["one", "two micro-batches"])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_the_laws_hold_in_all_of_a_run(share: float, setup: Setup) -> None:
    found = known(setup, share, (*paper(cache=CACHE[setup]).items(),))
    assert broken(found, CACHE[setup]) == set()
    assert gathered(found) > CACHE[setup] * 3 // 4, "void: the cache is not used"
    log = managed(found.engine).log
    assert not find_races(as_issued(log.operations))
    assert_sound(managed(found.engine))
    for step in found.per_step[1:]:
        assert not any(step[name] for name in ("on_demand_fetches", "evictions", "fallbacks"))
    assert found.per_step[0]["evictions"], "void: the first step evicts nothing"
    assert plan_of(found).in_place or setup.accumulate > 1
    twice = known(setup, 2.0, (*paper(cache=CACHE[setup]).items(),))
    assert plan_of(found).operations == plan_of(twice).operations, "what room there is beside the cache changes nothing"


@pytest.mark.parametrize(
    ("share", "options", "laws"),
    [
        (0.5, {}, {"fetch_waits", "update_waits", "cache_is_enough", "host_updates"}),
        (0.5, {"cache": CACHE[ONE]}, {"fetch_waits", "update_waits", "cache_is_enough"}),
        (2.0, {}, {"cache_is_enough", "host_updates"}),
    ],
    ids=lambda given: str(sorted(given)) if isinstance(given, set) else str(given),
)
def test_the_default_breaks_each(share: float, options: dict[str, Any], laws: set[str]) -> None:
    assert broken(known(ONE, share, (*options.items(),)), CACHE[ONE]) >= laws


def without(option: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    rules = dict(ElixirOptions.rules["paper"]) | {option: value}
    return lambda patch: patch.setattr(ElixirOptions, "rules", {"paper": rules})


def full_device_at_first(patch: pytest.MonkeyPatch) -> None:
    def layout(self: Elixir, index: Any) -> Any:
        found = own(self, index)
        self.warm_up_share = None
        return found

    own = Elixir.layout
    patch.setattr(Elixir, "layout", layout)


def placed_as_by_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ElixirOptions, "keeps_to_paper", False)


@pytest.mark.parametrize(
    ("mutate", "laws"),
    [
        (without("prefetch", 8), {"fetch_waits"}),
        (without("run_ahead", True), {"update_waits"}),
        (full_device_at_first, {"cache_is_enough"}),
        (placed_as_by_default, {"cache_is_enough", "host_updates"}),
    ],
)
def test_without_its_rule_a_law_breaks(
    mutate: Callable[[pytest.MonkeyPatch], None], laws: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    given = "inf" if "host_updates" in laws else CACHE[ONE]
    assert broken(run(ONE, 0.5, paper(cache=given)), CACHE[ONE]) >= laws


# ---- the bits of resident


def values_of(model: str) -> int:
    """Bytes of the parameters of a model."""
    return 4 * sum(value.numel() for value in on_one_rank(model, 1, CLIP, "fp32").parameters.values())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(8)
def test_half_of_resident_s_memory_holds_the_bits_of_one_rank(model: str, size: int) -> None:
    last, budget, most = Last(), half(model), values_of(model) // 3
    options = paper(cache=most)
    found = on_ranks(elixir(), model, size, 1, options, before=last.note, clip=CLIP, device_memory=budget, log_events=True)
    assert_is_one_rank(on_one_rank(model, size, CLIP, "fp32"), found)
    if size > 1:
        assert_as_it_should_be(found, last)
    for rank, each in enumerate(found):
        engine, plan = managed(each.engine), plan_of(each)
        assert_as_planned(each, last.counters[rank], [o.what for o in engine.log.operations[last.issued[rank] :]])
        assert_bytes_as_planned(plan, engine.log.bytes[last.bytes[rank] - 1 :])
        assert not find_races(as_issued(engine.log.operations))
        steady = [event.live for event in engine.log.bytes[last.bytes[rank] - 1 :] if event.tier == "device"]
        assert max(steady) == plan.predicted_device_peak_bytes
        assert max(steady) <= budget
        assert each.counters["fallbacks"] == each.counters["departures"] == 0
        assert broken(each, most) == set()


@pytest.mark.parametrize("share", shares(0))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(16)
def test_payloads_of_every_way_to_share_states(model: str, share: str) -> None:
    """[S, O, C] of a steady step, to the byte."""
    size, last, most = 2, Last(), values_of(model) // 2
    options = paper(**shares(most)[share])
    expected = on_one_rank(model, size, CLIP, "fp32")
    found = on_ranks(elixir(), model, size, 1, options, before=last.note, clip=CLIP, log_events=True)
    assert_is_one_rank(expected, found)
    assert_as_it_should_be(found, last)
    for rank, each in enumerate(found):
        whole = managed(each.engine).layout.param_bytes * (size - 1) // size
        moved = {counter: each.counters[counter] - last.counters[rank][counter] for counter in LANES.values()}
        assert moved["reduce_bytes"] == whole
        assert moved["gather_bytes"] == whole if share in ("ddp", "zero-2") else whole < moved["gather_bytes"] < 2 * whole
        assert (moved["h2d_bytes"] + moved["d2h_bytes"] > 0) == (share == "zero-3 with a host")
        assert plan_of(each).predicted_device_peak_bytes == each.memory.device_peak_bytes
        assert cache_is_enough(each, most) == (share != "zero-2")
        if share == "zero-2":
            assert gathered(each) >= managed(each.engine).layout.param_bytes, "all of it is brought together"


@pytest.mark.parametrize("bounded", [True, False])
def test_a_pass_without_gradients_has_no_more_than_the_cache(bounded: bool) -> None:
    """There is room for all parameters, and a plan in force; the rule is switched off the second time."""
    engine = start(elixir(), ONE.build(), settings(log_events=True), ElixirOptions(**paper(cache=CACHE[ONE])))
    ours = managed(engine)
    ours.strategy.bounded &= bounded

    def look(step: int, _: Any) -> None:
        with torch.no_grad():
            ours(input_ids=tokens(1, 1)[0, 0])

    found = train(engine, tokens(STEPS, 1), each_step=look)
    assert_equal(reference(ONE), found)
    assert cache_is_enough(found, CACHE[ONE]) is bounded


def test_a_device_of_the_predicted_peak_is_enough_and_a_smaller_cache_is_refused() -> None:
    least = plan_of(known(ONE, 0.5, (*paper(cache=CACHE[ONE]).items(),))).predicted_device_peak_bytes
    assert least is not None
    found = ONE.run(elixir(), least, ElixirOptions(**paper(cache=CACHE[ONE])), log_events=True)
    assert_equal(reference(ONE), found)
    assert broken(found, CACHE[ONE]) == set() and found.memory.device_peak_bytes == least
    told = 128 << 10
    for _ in range(2):  # before the first step, and by its trace
        match = r"cache of .* is less than the .* that one unit holds: raise cache, as `options=dict\(cache=\d+\)`$"
        with pytest.raises(BudgetError, match=match) as refused:
            ONE.run(elixir(), least, ElixirOptions(**paper(cache=told)))
        assert f"cache={refused.value.need})" in str(refused.value)
        told = refused.value.need
    assert_equal(reference(ONE), ONE.run(elixir(), least, ElixirOptions(**paper(cache=told))))


# ---- the fused chunk


def norms_trained() -> nn.Module:
    model = ONE.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer_norm" in name)
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fused_chunk_stays_in_a_step_and_the_host_updates_it(accumulate: int) -> None:
    """Frozen chunks stay in the cache from one step to the next: as the plan comes into force it brings them, once."""
    ids, most, begins = tokens(STEPS, accumulate), 460 << 10, list[int]()
    asked = settings(accumulate=accumulate, log_events=True)
    engine = start(elixir(), norms_trained(), asked, ElixirOptions(**paper(cache=most)))
    found = train(engine, ids, each_step=lambda *_: begins.append(len(managed(engine).log.operations)))
    assert_equal(train_as(RESIDENT, norms_trained(), ids), found)
    assert broken(found, most) <= {"fetch_waits"} and fetch_waits(found, most, begins[-1])
    (fused,) = managed(engine).strategy._staying
    layout = managed(engine).layout
    assert layout.bundles[fused].trainable and len(layout.bundles[fused].units) > 2
    fetched = [who for what, who in of_units(managed(engine).log) if what == "fetch"]
    assert fetched.count(fused) == STEPS < max(map(fetched.count, layout.bundles_of_unit[layout.bundles[fused].units[1]]))


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.one_in(2)
def test_a_fused_chunk_of_several_ranks(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload each updates its part on the host; without, on its device, where all of the chunk is for good."""
    monkeypatch.setattr("tests.systems.test_ranks.make", lambda model: norms_trained())
    last, most = Last(), 460 << 10
    options = paper(cache=most, offload=offload)
    found = on_ranks(elixir(), "norms", 2, options=options, before=last.note, log_events=True)
    for expected, each in zip(on_ranks(RESIDENT, "norms", 2), found, strict=True):
        assert_equal(expected, each)
    assert_as_it_should_be(found, last)
    for rank, each in enumerate(found):
        assert broken(each, most) <= {"fetch_waits"} | (set() if offload else {"host_updates"})
        assert fetch_waits(each, most, last.issued[rank])
        fused = {b.index for b in managed(each.engine).layout.bundles if not b.movable}
        assert bool(fused) is not offload and bool(managed(each.engine).strategy._staying) is offload
