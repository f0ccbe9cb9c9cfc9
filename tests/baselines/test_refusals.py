"""What a baseline cannot do it says in one line, with what to change, before any package is loaded where it can."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models import registry as models_registry
from systems import registry
from systems.errors import BudgetError, UnavailableError, UnsupportedError
from systems.settings import AdamSettings, Settings

DEEPSPEED = [name for name in registry.find() if name.startswith("deepspeed")]
OTHERS = ["fsdp2-offload", "roundpipe", "torch-ddp"]


def refuse(system: str, *options: str, **settings: Any) -> None:
    """Ask it for an engine; it had better refuse."""
    shape = models_registry.resolve("opt-tiny", {"num_layers": "2"})
    asked: dict[str, Any] = {"dtype": "fp32", "host_memory": 1 << 33}
    if system == "roundpipe":
        asked["recompute"] = "full"
    asked["initial_weights"] = models_registry.initial_weights(shape, 0)
    chosen = registry.get(system)
    parsed = registry.parse_options(chosen, options)
    chosen.initialize(models_registry.build(shape), Settings(**(asked | settings)), parsed)


def test_all_of_them_are_there() -> None:
    assert {
        "deepspeed-zero3-offload",
        "deepspeed-zero2-offload",
        "deepspeed-zero3",
        "deepspeed-zero2",
        "deepspeed-twinflow",
        "deepspeed-superoffload",
        "deepspeed-infinity",
        *OTHERS,
    } <= set(registry.find())


def test_listing_them_imports_no_package() -> None:
    """In a process of its own, since this one may have imported them."""
    code = (
        "import sys; from systems import registry; [registry.get(name) for name in registry.find()];"
        "assert not {'deepspeed', 'roundpipe'} & set(sys.modules), 'imported'"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("system", ["deepspeed-zero3-offload", "deepspeed-zero2", "deepspeed-twinflow"])
@pytest.mark.one_in(2)
def test_a_missing_package_is_unavailable(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UnavailableError, match=r"deepspeed does not load \(ModuleNotFoundError.*pip install") as caught:
        refuse(system)
    assert caught.value.install == "pip install -e '.[baselines]'"


def test_a_package_that_breaks_while_it_loads_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed.py").write_text("raise OSError('no such\\n library')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match="deepspeed does not load .OSError: no such library."):
        refuse("deepspeed-zero3-offload")


@pytest.mark.parametrize("system", [*DEEPSPEED, *OTHERS])
def test_one_rank(system: str) -> None:
    with pytest.raises(UnsupportedError, match="`ranks` at 1"):
        refuse(system, ranks=2)


@pytest.mark.parametrize("system", [*DEEPSPEED, *OTHERS])
def test_no_optimizer_from_outside(system: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(UnsupportedError, match="builds its own Adam"):
        refuse(system, optimizer=optimizer)


@pytest.mark.parametrize(
    "system", ["deepspeed-zero3-offload", "deepspeed-zero2-offload", "deepspeed-zero3", "deepspeed-twinflow", *OTHERS[::2]]
)
def test_a_host_budget_below_what_it_needs(system: str) -> None:
    with pytest.raises(BudgetError, match="of host memory for model states, 1MiB are allowed") as caught:
        refuse(system, host_memory=1 << 20)
    assert caught.value.tier == "host" and caught.value.need > caught.value.have == 1 << 20


def test_superoffload_wants_cuda_and_no_clipping() -> None:
    with pytest.raises(UnsupportedError, match="runs on CUDA only"):
        refuse("deepspeed-superoffload")
    with pytest.raises(UnsupportedError, match="use `clip=0`, or deepspeed-zero3-offload"):
        refuse("deepspeed-superoffload", device="cuda", clip=1.0)
    with pytest.raises(UnsupportedError, match="`dtype='bf16'`"):
        refuse("deepspeed-superoffload", device="cuda", dtype="fp16")
    with pytest.raises(UnsupportedError, match="AdamW only"):
        refuse("deepspeed-superoffload", device="cuda", adam=AdamSettings(decoupled=False))


def test_infinity_wants_a_folder_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"`options=dict\(nvme_path='FOLDER'\)`"):
        refuse("deepspeed-infinity")
    with pytest.raises(UnsupportedError, match="is not a folder"):
        refuse("deepspeed-infinity", f"nvme_path={tmp_path / 'nowhere'}")
    with monkeypatch.context() as patch:
        patch.setattr("systems.baselines.external.deepspeed_config.in_memory", lambda folder: "tmpfs")
        with pytest.raises(UnsupportedError, match=r"is in memory \(tmpfs\): name a folder on a disk"):
            refuse("deepspeed-infinity", f"nvme_path={tmp_path}")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1024}))
    with pytest.raises(BudgetError, match="1KiB are free there") as caught:
        refuse("deepspeed-infinity", f"nvme_path={tmp_path}")
    assert caught.value.tier == "disk"


def test_roundpipe_wants_cuda_and_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="runs on CUDA only"):
        refuse("roundpipe")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UnsupportedError, match="set CUDA_VISIBLE_DEVICES to one"):
        refuse("roundpipe", device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match="`recompute='full'`"):
        refuse("roundpipe", device="cuda", recompute="none")
    monkeypatch.setitem(sys.modules, "roundpipe", None)
    with pytest.raises(UnavailableError, match="roundpipe does not load"):
        refuse("roundpipe", device="cuda")


def test_loss_scales_that_are_not_there() -> None:
    with pytest.raises(UnsupportedError, match="weights='autocast'"):
        refuse("torch-ddp", dtype="fp16")
    with pytest.raises(UnsupportedError, match="`dtype='bf16'`"):
        refuse("fsdp2-offload", dtype="fp16")


@pytest.mark.parametrize(
    ("system", "option", "told"),
    [
        ("deepspeed-twinflow", "ratio=1.5", "`options=dict(ratio='1.5')`"),
        ("deepspeed-twinflow", "reserve=lots", "`options=dict(reserve='lots')`"),
        ("deepspeed-zero3", "ratio=0.5", "unknown option of deepspeed-zero3 'ratio'"),
        ("torch-ddp", "weights=fp8", "`options=dict(weights='fp8')`"),
        ("roundpipe", "asynchronous=perhaps", "`options=dict(asynchronous='perhaps')`"),
        ("deepspeed-zero3", "config=/nowhere.json", "cannot be read"),
    ],
)
def test_options_are_checked(system: str, option: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        refuse(system, option)


@pytest.mark.parametrize(
    ("system", "config", "told"),
    [
        ("deepspeed-zero3", {"gradient_clipping": 1.0}, "sets gradient_clipping to 1.0, here it is 0.0: `clip` decides"),
        ("deepspeed-zero3", {"zero_optimization": {"stage": 2}}, "deepspeed-zero3 is named after it"),
        ("deepspeed-zero3", {"optimizer": {"params": {"lr": 1.0}}}, "the optimizer's own decides"),
        ("deepspeed-zero3", {"bf16": {"enabled": True}}, "`dtype` decides"),
        ("deepspeed-zero3", {"scheduler": {"type": "WarmupLR"}}, "the run's own decides"),
        ("torch-ddp", {"ddp": {"bucket_cap": 1}}, "unknown argument of ddp 'bucket_cap': did you mean bucket_cap_mb"),
        ("fsdp2-offload", {"optimizer": {"lr": 1}}, "unknown argument of optimizer 'lr'"),
        ("fsdp2-offload", {"cpu": {}}, "unknown section 'cpu'"),
        ("fsdp2-offload", {"cpu_offload": 3}, "an object is needed"),
    ],
)
def test_a_users_file_is_checked(system: str, config: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=told):
        refuse(system, f"config={path}")


@pytest.mark.parametrize(("text", "told"), [("[1]", "an object is needed"), ("{", "is not JSON")])
def test_a_users_file_holds_an_object(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        refuse("deepspeed-zero3", f"config={path}")
