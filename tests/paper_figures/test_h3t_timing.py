"""What the paper says about its timing diagrams (figures 7 to 9, appendix A) holds for the simulated ones."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paper_figures.h3t_timing import AHEAD, ECONOMICAL, FIGURES, SYMBOLS, main
from paper_figures.h3t_workflow import CALCULATION, HOST_LINK, LINK, Case, Diagram, Lengths, Shown, drawn
from systems.strategies.h3t.switches import ALL_ON, EVERY, Switches
from tests.planning.chrome import read_chrome_trace

EPS = 1e-6
COMPUTED = {"edge", "forward", "forward again", "backward"}
POST = {"hidden out", "scatter", "offload"}
PREPARATION = {"hidden in", "prefetch", "gather"}


@cache
def panel(start: str) -> Diagram:
    (found,) = [p for panels in FIGURES.values() for p in panels if p.title.startswith(start)]
    return drawn(found.case)


def of(diagram: Diagram, name: str, layer: int | None = None) -> list[Shown]:
    return [o for o in diagram.operations if o.name == name and layer in (None, o.layer)]


def on(diagram: Diagram, stream: str) -> list[Shown]:
    return [o for o in diagram.operations if o.stream == stream]


def only(diagram: Diagram, name: str, layer: int) -> Shown:
    (found,) = of(diagram, name, layer)
    return found


def before(one: Shown, other: Shown) -> bool:
    return one.end_s <= other.start_s + EPS


def idle_between(diagram: Diagram, names: set[str]) -> float:
    """Seconds in which the calculation stream waits between the first and the last of these."""
    found = sorted((o for o in on(diagram, CALCULATION) if o.name in names), key=lambda o: o.start_s)
    return found[-1].end_s - found[0].start_s - sum(o.end_s - o.start_s for o in found)


def test_the_default_workflow_gathers_once_and_closes_the_loop_of_parameters_and_gradients() -> None:
    """7a: gather, forward, backward, reduce scatter, offload, update on the CPU, prefetch: once each, in this order."""
    diagram = panel("7a")
    for layer in (1, 2, 3):
        names = ("gather", "forward", "backward", "scatter", "offload", "optimize", "prefetch")
        chain = [only(diagram, name, layer) for name in names]
        assert all(before(*pair) for pair in pairwise(chain))
    assert not of(diagram, "hidden out") and not of(diagram, "hidden in") and not of(diagram, "forward again")
    forwards = [s for s in on(diagram, HOST_LINK) if s.segment in diagram.forward_segments]
    assert forwards == [], "the PCI-E stream is idle in forward but for what the last step's updates left"


def test_rematerialisation_runs_a_forward_again_right_before_its_backward() -> None:
    """7b: nothing moves that did not before; the step is longer by the forwards, and takes less memory."""
    default, diagram = panel("7a"), panel("7b")
    for layer in (1, 2, 3):
        again, backward = only(diagram, "forward again", layer), only(diagram, "backward", layer)
        assert again.end_s == pytest.approx(backward.start_s)
    for stream in (LINK, HOST_LINK):
        assert [(o.name, o.layer) for o in on(diagram, stream)] == [(o.name, o.layer) for o in on(default, stream)]
    assert diagram.step_time_s == pytest.approx(default.step_time_s + 3 * Lengths().forward_s)
    assert diagram.peak_bytes < default.peak_bytes


def test_hidden_states_leave_beside_forward_and_are_back_before_their_backward() -> None:
    """7c"""
    default, diagram = panel("7a"), panel("7c")
    for layer in (1, 2, 3):
        out, back = only(diagram, "hidden out", layer), only(diagram, "hidden in", layer)
        assert out.segment == only(diagram, "forward", layer).segment + 1, "post-process of the layer before"
        assert before(out, back) and before(back, only(diagram, "backward", layer))
    assert diagram.step_time_s == pytest.approx(default.step_time_s), "it hides behind compute"
    assert diagram.peak_bytes < default.peak_bytes


def test_partitioned_parameters_are_gathered_again_for_backward_beside_the_layer_before() -> None:
    """7d"""
    default, diagram = panel("7a"), panel("7d")
    for layer in (1, 2, 3):
        _, again = of(diagram, "gather", layer)
        assert before(only(diagram, "forward", layer), again) and before(again, only(diagram, "backward", layer))
        if layer < 3:
            beside = only(diagram, "backward", layer + 1)
            assert beside.start_s - EPS <= again.start_s and again.end_s <= beside.end_s + EPS
    assert len(of(diagram, "prefetch")) == 3, "the shard is still there"
    assert diagram.peak_bytes < default.peak_bytes


def test_lazy_prefetching_goes_right_before_the_gather_and_nothing_rests() -> None:
    """7e: where the default prefetches once the update is done, whether or not the layer comes next."""
    default, diagram = panel("7a"), panel("7e")
    for layer in (1, 2, 3):
        lazy, gather = only(diagram, "prefetch", layer), only(diagram, "gather", layer)
        assert lazy.segment == gather.segment < only(diagram, "forward", layer).segment and before(lazy, gather)
        assert only(default, "prefetch", layer).segment > only(default, "backward", 1).segment
    both = {lazy: drawn(Case(Switches(rematerialise=True, partition=True, lazy_prefetch=lazy))) for lazy in (False, True)}
    assert both[True].peak_bytes < both[False].peak_bytes
    assert len(of(both[True], "prefetch")) == 6, "before every gather"


PAIRS = [("8a", True, range(1, 5)), ("8b", True, range(6, 10)), ("8c", False, range(1, 5)), ("8d", False, range(6, 10))]


@pytest.mark.parametrize(("letter", "link", "segments"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_economical_runs_post_process_first_and_non_economical_preparation(letter: str, link: bool, segments: range) -> None:
    ahead, economical = panel(f"{letter} non"), panel(f"{letter} eco")
    seen = 0
    for diagram, first, second in ((economical, POST, PREPARATION), (ahead, PREPARATION, POST)):
        assert {o.stream for o in diagram.operations} == {CALCULATION, HOST_LINK, "CPU", *([LINK] if link else [])}
        for segment in segments:
            for stream in (HOST_LINK, LINK):
                mine = [o for o in on(diagram, stream) if o.segment == segment]
                early, late = ([o for o in mine if o.name in names] for names in (first, second))
                assert all(before(one, other) for one in early for other in late)
                seen += bool(early and late)
    assert seen >= 4, "void: not both inner segments have both on one stream"


@pytest.mark.parametrize("link", [True, False])
def test_economical_saves_memory_and_non_economical_delays_the_next_layer_less(link: bool) -> None:
    ahead, economical = (drawn(Case(s, 4, link)) for s in (AHEAD, ECONOMICAL))
    assert economical.peak_bytes < ahead.peak_bytes
    assert idle_between(ahead, {"forward"}) < idle_between(economical, {"forward"})
    assert idle_between(ahead, COMPUTED - {"edge"}) < idle_between(economical, COMPUTED - {"edge"})
    assert ahead.step_time_s < economical.step_time_s


def test_economical_mode_is_still_asynchronous() -> None:
    """So it is not memory-optimal: communication runs beside the computation of its segment."""
    for link in (True, False):
        diagram = drawn(Case(ECONOMICAL, 4, link))
        for segment in (*diagram.forward_segments[1:], *diagram.backward_segments[1:]):
            mine = [o for o in diagram.operations if o.segment == segment and o.stream != "CPU"]
            computes = [o for o in mine if o.stream == CALCULATION]
            moves = [o for o in mine if o.stream != CALCULATION]
            assert any(m.start_s < c.end_s - EPS and c.start_s < m.end_s - EPS for m in moves for c in computes)


def test_without_nvlink_everything_that_moves_takes_its_turn_on_pci_e() -> None:
    for switches in (AHEAD, ECONOMICAL):
        with_link, without = (drawn(Case(switches, 4, link)) for link in (True, False))
        assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in on(with_link, LINK) for b in on(with_link, HOST_LINK))
        assert not on(without, LINK)
        assert {o.name for o in on(without, HOST_LINK)} == POST | PREPARATION
        assert without.step_time_s > with_link.step_time_s


def segments_of(diagram: Diagram) -> list[list[Shown]]:
    """What runs on the device, by segment; behind the last, what the optimizer leaves to prefetch is in none."""
    moved = [o for o in diagram.operations if o.stream != "CPU"]
    return [[o for o in moved if o.segment == number] for number in range(2 * diagram.case.layers + 3)]


def test_with_synchronisation_a_segment_waits_for_all_of_the_one_before_and_without_it_may_not() -> None:
    free, joined = panel("9 without"), panel("9 with segment")
    for one, other in pairwise(segments_of(joined)):
        assert max(o.end_s for o in one) <= min(o.start_s for o in other) + EPS
    overtaken = [
        (one, other)
        for one, other in pairwise(segments_of(free))
        if max(o.end_s for o in one) > min((o.start_s for o in other if o.stream == CALCULATION), default=1.0) + EPS
    ]
    assert overtaken, "the next segment's computation starts before this one's tasks end"


def test_synchronisation_saves_memory_for_a_little_time() -> None:
    free, joined = panel("9 without"), panel("9 with segment")
    assert joined.peak_bytes < free.peak_bytes
    assert free.step_time_s < joined.step_time_s < 1.2 * free.step_time_s


millis = st.integers(1, 12).map(lambda n: n / 1000)
lengths = st.builds(Lengths, *(millis for _ in range(8)))


@settings(max_examples=40, deadline=None)
@given(switches=st.sampled_from(EVERY), layers=st.integers(1, 4), link=st.booleans(), lengths=lengths)
def test_any_case_runs_its_streams_in_order_and_synchronisation_is_kept(
    switches: Switches, layers: int, link: bool, lengths: Lengths
) -> None:
    diagram = drawn(Case(switches, layers, link, lengths))
    for stream in (CALCULATION, LINK, HOST_LINK):
        mine = on(diagram, stream)
        assert all(before(*pair) for pair in pairwise(mine)), "a stream is a queue"
    for layer in range(1, layers + 1):
        forward, backward = only(diagram, "forward", layer), only(diagram, "backward", layer)
        assert before(forward, backward) and before(of(diagram, "gather", layer)[0], forward)
    if switches.synchronise:
        for one, other in pairwise(segments_of(diagram)):
            assert not one or not other or max(o.end_s for o in one) <= min(o.start_s for o in other) + EPS
    compute = sum(o.end_s - o.start_s for o in on(diagram, CALCULATION))
    assert diagram.step_time_s >= compute - EPS


def test_every_switch_saves_memory_with_all_others_on() -> None:
    """But for synchronisation, which here only spares what lags behind."""
    least = drawn(Case(ALL_ON, 4)).peak_bytes
    for name in ("rematerialise", "offload_hidden", "partition", "lazy_prefetch", "economical_forward"):
        assert drawn(Case(replace(ALL_ON, **{name: False}), 4)).peak_bytes >= least


@pytest.mark.long
def test_files_are_written_and_hold_what_was_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "folder"
    assert main(["--out", str(folder)]) == 0
    said = capsys.readouterr().out
    assert (folder / "h3t_timing.txt").read_text() == said
    assert {path.name for path in folder.iterdir()} == {
        *(f"figure{number}.{kind}" for number in (7, 8, 9) for kind in ("svg", "png")),
        "h3t_timing.json",
        "h3t_timing.txt",
    }
    found = read_chrome_trace(json.loads((folder / "h3t_timing.json").read_text()))
    for panels in FIGURES.values():
        for each in panels:
            assert each.title in said
            shown = each.shown(drawn(each.case))
            assert sorted(e.start_s for e in found[each.title]) == pytest.approx(sorted(o.start_s for o in shown))
            assert {o.name for o in shown} <= set(SYMBOLS)


@pytest.mark.parametrize("given", [["--in"], ["--out"], ["figure7"], ["--out", "a", "b"]])
def test_unknown_arguments_are_named(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--out FOLDER" in said


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
