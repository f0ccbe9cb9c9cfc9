"""`harness plan`: what it prints, that its exit code says whether it fits, and that bad input is one line."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from harness import cli
from harness.plan_spec import PlanSpec
from harness.spec import RunSpec, flag
from systems import registry
from systems.planning import hardware
from systems.sizes import format_size
from tests.planning.chrome import read_chrome_trace

TINY = ("plan", "--model", "opt-tiny", "--hardware", "h100-80g-x1", "--device", "cpu")
SGD = (*TINY, "--system", "elixir", "--optimizer", "sgd")
STRATEGIES = {name for name, entry in registry.find().items() if entry.exposes == "STRATEGY"}


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, last line of stdout, stderr)."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 1
    return code, json.loads(lines[0]), captured.err


def test_a_plan_has_the_keys_of_a_record_and_says_it_to_the_eye(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "elixir", "--device-memory", "6MiB")
    assert code == 0 and found["fits"]
    assert set(RunSpec.model_fields) <= set(found["spec"])
    assert set(found["plan"]) == {"predicted_step_time_s", "predicted_device_peak_bytes"}
    assert found["plan"]["predicted_device_peak_bytes"] == found["tiers"]["device"]["need_bytes"] <= 6 << 20
    assert "allocator" not in found["tiers"]["device"]["parts"]
    for tier in found["tiers"].values():
        assert sum(tier["parts"].values()) == tier["need_bytes"]
    tokens = found["resolved"]["tokens_per_step"]
    assert found["tokens_per_s"] == pytest.approx(tokens / found["plan"]["predicted_step_time_s"])
    assert found["bound"] in found["bounds_s"] and found["remedies"] == []
    for word in ("weights", "master", "moments", "activations", "there is", "to spare", "fits", "tokens/s", "bounds", "bound"):
        assert word in shown


@pytest.mark.parametrize("system", ["elixir", "all"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_says_what_is_waited_for(system: str, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main((*TINY, "--system", system)) == 0
    assert ("planning opt-tiny under" in stream.getvalue()) is terminal


def test_what_does_not_fit_is_exit_code_1_with_the_minimum_and_who_sets_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "elixir", "--device-memory", "300KiB", "--batch-size", "8")
    assert code == 1 and not found["fits"]
    assert found["tiers"]["device"]["spare_bytes"] < 0
    least = found["least_device_bytes"]
    assert found["tiers"]["device"]["need_bytes"] == least
    assert "needs at least" in found["why_not"] and "unit 'model.decoder" in found["why_not"]
    assert "does not fit" in shown and "too much" in shown and "would fit" in shown
    assert any(remedy["changes"] == {"device_memory": least} for remedy in found["remedies"])
    assert told(capsys, *TINY, "--system", "elixir", "--device-memory", str(least), "--batch-size", "8")[0] == 0


def test_a_gpu_keeps_a_part_of_its_memory_for_its_allocator(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left free is part of the need, and the expected peak lies between the bytes of the plan and the budget."""
    sized = ("--model", "opt-350m", "--set", "num_layers=6", "--batch-size", "1")
    model = ("plan", "--system", "elixir", "--hardware", "h100-80g-x1", *sized)
    code, found, shown = told(capsys, *model, "--device-memory", "4GiB")
    need, parts = found["tiers"]["device"]["need_bytes"], found["tiers"]["device"]["parts"]
    assert code == 0 and sum(parts.values()) == need <= 4 << 30
    assert 0 < parts["allocator"] < 0.1 * (4 << 30) and "allocator" in shown
    assert need - parts["allocator"] <= found["plan"]["predicted_device_peak_bytes"] <= 4 << 30
    least = found["least_device_bytes"]
    code, below, _ = told(capsys, *model, "--device-memory", str(least - (1 << 20)))
    assert code == 1 and least == below["least_device_bytes"] <= below["tiers"]["device"]["need_bytes"]
    assert told(capsys, *model, "--device-memory", str(least))[0] == 0


NORM_BOUND = ("--model", "opt-1.3b", "--set", "num_layers=6", "--batch-size", "4", "--seq-len", "128", "--recompute", "full")


def test_what_runs_ahead_of_the_norm_is_told_with_what_it_takes_and_gains(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "--system", "elixir", "--hardware", "h100-80g-x1", *NORM_BOUND, "--device-memory", "2GiB")
    code, found, shown = told(capsys, *asked)
    ahead, host = found["ahead"], found["tiers"]["host"]
    assert code == 0 and set(ahead) == {
        *("spare_bytes", "taken_bytes", "share", "step_time_s", "waiting_step_time_s", "more"),
    }
    assert 0 < ahead["share"] <= 1 and ahead["taken_bytes"] == host["parts"]["second versions"] <= ahead["spare_bytes"]
    assert ahead["step_time_s"] == found["plan"]["predicted_step_time_s"] < ahead["waiting_step_time_s"]
    lines = " ".join(shown.split())
    assert f"{ahead['share']:.0%} of the updates on the host run ahead of the norm, with second versions of" in lines
    assert f"{ahead['step_time_s']:.4g} s a step, {ahead['waiting_step_time_s']:.4g} s without" in lines
    assert "second versions" in shown and "would with" not in lines and "is clipped" not in lines
    assert "without, as where a step is clipped" in " ".join(told(capsys, *asked, "--clip", "1.0")[2].split())
    least = host["have_bytes"] - ahead["spare_bytes"]
    code, tight, shown = told(capsys, *asked, "--host-memory", str(least))
    more, lines = tight["ahead"]["more"], " ".join(shown.split())
    assert code == 0 and tight["ahead"]["share"] == 0 and more["nbytes"] == ahead["taken_bytes"]
    assert "no update on the host runs ahead of the norm, 0B of host memory to spare: there is too little" in lines
    assert (
        f"more host memory a node: {more['step_time_s']:.4g} s a step" in lines and f"{more['share']:.0%} would with" in lines
    )


def test_no_word_of_the_norm_where_no_update_waits_or_the_host_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "elixir", "--device-memory", "4MiB")
    assert code == 0 and found["ahead"]["share"] == 0 and found["ahead"]["more"] is None
    assert "of host memory to spare: none would gain by it" in " ".join(shown.split())
    for more in (("--option", "nonfinite=stop"), ("--host-memory", "8MiB")):
        _, found, shown = told(capsys, *TINY, "--system", "elixir", "--device-memory", "4MiB", *more)
        assert found["ahead"] is None and "ahead of the norm" not in shown and "second versions" not in shown


def test_what_a_strategy_decided_is_told_as_its_statistics_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "patrickstar", "--device-memory", "4MiB")
    told_of, lines = found["statistics"], " ".join(shown.split())
    assert code == 0 and told_of["chunk_size_bytes"] == 2 * told_of["chunk_size_elements"] > 0
    assert f"decided by patrickstar: minimum {format_size(told_of['minimum_bytes'])}, " in lines
    assert f"chunk size {format_size(told_of['chunk_size_bytes'])}, utilization {told_of['utilization']:.4g}, " in lines
    assert len(told_of["non_model_bytes"]) > 20 and "[" not in lines.split("decided by")[1].split("written back")[0]
    _, found, shown = told(capsys, *TINY, "--system", "resident", "--device-memory", "64MiB")
    assert found["statistics"] == {} and "decided by" not in shown


def test_what_the_host_has_to_hold_before_there_is_a_plan_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The steady step needs less than there is, and the run is refused: the paper's warm-up bounds what the device takes."""
    asked = (*TINY, "--system", "patrickstar", "--option", "variant=paper", "--device-memory", "6MiB", "--host-memory")
    code, found, shown = told(capsys, *asked, "14976KiB")
    host = found["tiers"]["host"]
    steady = host["need_bytes"] - host["parts"]["before a plan"]
    assert code == 1 and steady < 14976 << 10 < host["need_bytes"] and "before a plan" in shown
    assert told(capsys, *asked, str(host["need_bytes"]))[0] == 0


OPTIMIZERS = [("adamw", (), 2), ("sgd", (), 0), ("sgd", ("--hyper", "momentum=0.9"), 1), ("lion", (), 1)]


@pytest.mark.parametrize("system", ["elixir", "angel-ptm", "resident"])
def test_states_are_those_of_the_optimizer(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    """moments: of as many times the bytes of the master weights, on each tier; second versions and the disk have them too."""
    seconds: dict[int, int] = {}
    budget = () if system == "resident" else ("--device-memory", "6MiB")
    flags = (*TINY, "--system", system, *budget, "--clip", "1.0")
    for name, more, moments in OPTIMIZERS:
        _, found, _ = told(capsys, *flags, "--optimizer", name, *more)
        for tier in found["tiers"].values():
            parts = tier["parts"]
            assert parts.get("moments", 0) == moments * parts.get("master", 0)
            assert sum(parts.values()) == tier["need_bytes"]
        tier = found["tiers"]["device" if system == "resident" else "host"]
        assert tier["parts"]["master"] > 0
        seconds[moments] = tier["need_bytes"]
    assert seconds[0] < seconds[1] < seconds[2]


def test_a_package_plans_with_adam_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "deepspeed-zero3", "--optimizer", "lion")
    assert code == 1 and not found["fits"] and found["why_not"] in shown
    assert found["why_not"] == "deepspeed-zero3 trains with Adam alone here: --optimizer adamw"


def test_all_ranks_every_system_that_plans(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "all", "--device-memory", "6MiB", "--clip", "1.0")
    assert code == 0
    assert {one["system"] for one in found["ranking"]} == STRATEGIES | {"resident"}
    assert [one["fits"] for one in found["ranking"]] == sorted((one["fits"] for one in found["ranking"]), reverse=True)
    times = [one["plan"]["predicted_step_time_s"] for one in found["ranking"] if one["fits"]]
    assert times == sorted(times) and found["plan"]["predicted_step_time_s"] == times[0]
    assert found["ranking"][-1]["system"] == "resident" and "resident does not fit" in shown


def test_where_none_fits_the_change_that_would_make_one_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*TINY, "--system", "all", "--device-memory", "6MiB", "--batch-size", "64")
    code, found, shown = told(capsys, *asked)
    assert code == 1 and not any(one["fits"] for one in found["ranking"])
    (improved,) = (one for one in found["ranking"] if one["remedies"])
    assert f"none fits as it is asked; {improved['system']} with a change:" in shown and "would fit: " in shown
    lower = next(each for each in improved["remedies"] if "batch_size" in each["changes"])
    arguments = shlex.split(lower["command"])[1:]
    assert improved["system"] in arguments or "all" in arguments
    assert told(capsys, *arguments)[0] == 0
    for one in found["alternatives"]:
        assert told(capsys, *shlex.split(one["command"])[1:])[0] == 0


MINE = """
import torch, transformers
def build():
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained("mine"))
"""


@pytest.mark.parametrize("model", ["mine", "mine_too:build"])
def test_a_model_of_ones_own_is_a_folder_with_a_config_or_a_function(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path / "mine")
    (tmp_path / "mine_too.py").write_text(MINE)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
    monkeypatch.chdir(tmp_path)
    code, found, shown = told(capsys, "plan", "--system", "all", "--model", model, "--hardware", "h100-80g-x1")
    assert code == 0 and found["resolved"]["seq_len"] == 1024
    assert {one["system"] for one in found["ranking"] if one["fits"]} == STRATEGIES | {"resident"}
    masters = found["ranking"][0]["tiers"]["device"]["parts"]["master"]
    parameters = sum(p.numel() for p in transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).parameters())
    assert 4 * parameters <= masters < 4.2 * parameters and f"{model} under every system" in shown


def test_a_system_that_cannot_do_it_anywhere_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *TINY, "--system", "torch-ddp", "--option", "weights=compute")
    assert code == 1 and found["plan"]["predicted_step_time_s"] is None
    assert "has no forecast" in found["why_not"] and "has no forecast" in shown
    refused = told(capsys, *TINY, "--system", "elixir", "--option", "nonfinite=stop", "--clip", "1.0")
    assert refused[0] == 1 and "clip" in refused[1]["why_not"]


RANKS = ("plan", "--model", "opt-tiny", "--hardware", "h100-80g-x2", "--device", "cpu", "--ranks", "2")


def test_a_plan_of_several_ranks_says_what_each_moves_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *RANKS, "--system", "elixir", "--device-memory", "6MiB")
    lines = " ".join(shown.split())
    assert code == 0 and found["resolved"]["ranks"] == 2 and {"gather", "reduce"} <= set(found["bytes"])
    assert f"each rank: {found['tokens_per_s'] / 2:.4g} tokens/s, and in a step" in lines
    assert "gathered through the link" in lines and "reduced through it" in lines
    assert found["assumed"] == list(hardware.load("h100-80g-x2").assumed) and "node_both_ways_bytes_per_s" in found["assumed"]
    assert f"assumed by the profile: {', '.join(found['assumed'])}" in lines
    assert [f"left out: {what}" in lines for what in found["left_out"]] == [True, True]
    code, alone, shown = told(capsys, *RANKS[:-1], "1", "--system", "elixir", "--device-memory", "6MiB")
    assert code == 0 and alone["left_out"] == [] and "each rank" not in shown and "left out" not in shown


def test_what_other_packages_would_do_is_by_their_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = told(capsys, *RANKS, "--system", "deepspeed-zero3-offload")
    assert code == 0 and found["bytes"].keys() == {"h2d", "d2h", "gather", "reduce"}
    assert "what deepspeed-zero3-offload takes in time and memory beyond its rules" in " ".join(shown.split())


def test_the_least_device_may_need_more_of_the_host_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*RANKS, "--system", "elixir", "--device-memory", "12MiB")
    host = told(capsys, *asked[:-1], "4MiB")[1]["tiers"]["host"]["need_bytes"]
    code, found, shown = told(capsys, *asked, "--host-memory", str(host * 3 // 4))
    assert code == 0 and found["least_device_host_bytes"] > host * 3 // 4
    assert "would be enough with" in shown and "of host memory a node" in shown


FULL = ("--batch-size", "2", "--seq-len", "512", "--recompute", "full")


@pytest.mark.parametrize(
    ("model", "system", "machine", "more"),
    [
        ("bert-13b", "elixir", "h3t-a100-40g-x8", FULL),
        pytest.param("angel-175b", "patrickstar", "h3t-a100-40g-x64", FULL, marks=pytest.mark.slow),
        ("angel-13b", "patrickstar", "h3t-a100-40g-x64", FULL),
        ("gpt-20b", "patrickstar", "superpod-a100-40g-x8", ("--batch-size", "4", "--recompute", "full")),
        ("t5-tiny", "elixir", "h3t-2080ti-10g-x8", ("--dtype", "fp16", "--accumulate", "2")),
    ],
)
@pytest.mark.long
def test_models_and_machines_of_the_papers(
    model: str, system: str, machine: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, _ = told(capsys, "plan", "--system", system, "--model", model, "--hardware", machine, *more)
    assert code == 0
    assert found["resolved"]["ranks"] == int(machine.rpartition("-x")[2])
    assert found["plan"]["predicted_step_time_s"] >= max(found["bounds_s"].values()) * 0.999


@pytest.mark.long
def test_175b_on_768_devices_takes_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--batch-size", "1", "--seq-len", "2048", "--recompute", "full")
    started_s = time.process_time()
    code, found, _ = told(
        capsys, "plan", "--system", "elixir", "--model", "angel-175b", "--hardware", "angel-a100-40g-x768", *more
    )
    assert time.process_time() - started_s < 10
    assert code == 0 and found["resolved"]["tokens_per_step"] == 768 * 2048
    device, host = found["tiers"]["device"], found["tiers"]["host"]
    assert device["parts"]["master"] + device["parts"]["moments"] == pytest.approx(12 * 173e9 / 768, rel=0.1)
    assert host["need_bytes"] == pytest.approx(2 * 173e9 / 96, rel=0.1)


def test_the_trace_is_the_simulated_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    code, found, _ = told(capsys, *TINY, "--system", "elixir", "--device-memory", "4MiB", "--trace", str(file))
    assert code == 0
    (events,) = read_chrome_trace(json.loads(file.read_text())).values()
    busy: dict[str, float] = {}
    for event in events:
        busy[event.lane] = busy.get(event.lane, 0.0) + event.duration_s
    assert busy == pytest.approx(found["busy_s"])


def broken(tmp_path: Path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "h100-80g-x1", "h2d_bytes_per_s": {"value": -1, "source": "x"}}))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--system", "elixir", "--model", "opt-tiny"), "--hardware is missing: a hardware profile: a name"),
        (("plan", "--system", "elixir", "--model", "opt-tiny", "--hardware", "h100-80g-x3"), "did you mean h100-80g-x"),
        ((*TINY, "--system", "elxir"), "unknown system 'elxir': did you mean elixir?"),
        ((*TINY, "--system", "dummy"), "dummy makes no plan that could be simulated: harness run measures it"),
        ((*TINY, "--system", "elixir", "--model", "opt-tny"), "unknown model 'opt-tny'"),
        ((*TINY, "--system", "elixir", "--option", "cach=1"), "unknown option of elixir"),
        ((*TINY, "--system", "elixir", "--ranks", "2"), "--ranks 2 is more than the 1 devices of the profile"),
        ((*TINY, "--system", "elixir", "--recompute", "9"), "there is no block 9"),
        ((*TINY, "--system", "elixir", "--seq-len", "100000"), "opt-tiny"),
        ((*TINY, "--system", "all", "--option", "prefetch=1"), "--option prefetch=1 is of one system"),
        ((*TINY, "--system", "all", "--trace", "x.json"), "--trace is of one system"),
        ((*TINY, "--system", "elixir", "--trace", "/proc/x.json"), "--trace /proc/x.json cannot be written"),
        ((*TINY, "--system", "elixir", "--trace", "x.txt"), "--trace x.txt: name a file that ends in .json or .json.gz"),
        *(
            ((*TINY, "--system", "elixir", flag(field)), f"{flag(field)} is of a run and changes nothing here: leave it out")
            for field in sorted(PlanSpec.left_out)
        ),
        ((*TINY, "--system", "elixir", "--lr=1e-4"), "--lr is of a run and changes nothing here"),
        ((*TINY, "--system", "elixir", "--optimizer", "sdg"), "unknown optimizer 'sdg': did you mean sgd?"),
        ((*TINY, "--system", "elixir", "--hyper", "momentum=1"), "unknown hyperparameter of adamw 'momentum'"),
        ((*TINY, "--system", "elixir", "--hyper", "lr=1"), "--hyper lr=1: it has a flag of its own, --lr"),
        ((*SGD, "--hyper", "momentum=x"), "momentum of sgd 'x': input should be a valid number"),
        ((*SGD, "--hyper", "momentum=-1"), "momentum of sgd is -1.0: give a finite number of at least 0"),
        ((*SGD, "--hyper", "momentum=inf"), "momentum of sgd is inf: give a finite number of at least 0"),
        ((*SGD, "--hyper", "nesterov=true"), "nesterov needs momentum above 0 and no dampening"),
        ((*TINY, "--system", "elixir", "--optimizer", "lion", "--hyper", "betas=0.9,1"), "betas are (0.9, 1.0): give two"),
        ((*TINY, "--system", "elixir", "--batch-size", "99999999"), "tokens at once on a device"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    *_, last = captured.err.splitlines()
    assert said in last and "Traceback" not in captured.err and captured.out == ""


def test_a_broken_profile_names_file_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken(tmp_path)
    assert cli.main(("plan", "--system", "elixir", "--model", "opt-tiny", "--hardware", path)) == 2
    assert f"hardware profile {path}: h2d_bytes_per_s.value: input should be greater than 0" in capsys.readouterr().err


def test_a_trace_whose_name_says_so_is_compressed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "step.json.gz"
    assert told(capsys, *TINY, "--system", "elixir", "--trace", str(file))[0] == 0
    assert read_chrome_trace(json.loads(gzip.decompress(file.read_bytes())))
    assert [path.name for path in file.parent.iterdir()] == ["step.json.gz"]
