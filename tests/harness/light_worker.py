"""Stands in for the process of a run in tests of its parent: the same entry and messages, a script in place of training.

It imports no torch, so it is there in a moment. Its options are some of the scripted system's, steps counted from 1; 0 is
initialize, the number after the last a save. With `rank` they are of one of several ranks, and the others wait for ever, or
with `others=follow` tell that one is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import time
import types
from pathlib import Path

import harness
from harness.channel import Channel, WorkerJob
from harness.record import Record, build
from harness.spec import BadInputError
from systems.registry import split_assignments

_HOUR_S = 3600.0


def misbehave(at: int, script: dict[str, str]) -> None:
    """What the options say of this step."""

    def now(option: str) -> bool:
        return script.get(option) == str(at)

    if now("child_at") and os.fork() == 0:
        time.sleep(_HOUR_S)
        os._exit(0)
    if now("crash_at"):
        raise RuntimeError(f"the script says that step {at} crashes")
    if now("thread_oom_at"):  # as a package that ends the process for an error in a thread of its own
        sys.stderr.write("Exception in thread Thread-2:\ntorch.OutOfMemoryError: CUDA out of memory. ")
        sys.stderr.write("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free.\n")
        os._exit(1)
    if now("exit_at"):
        os._exit(int(script.get("exit_code", 3)))
    if now("signal_at"):
        os.kill(os.getpid(), int(script.get("signal", signal.SIGKILL)))
    if now("segfault_at"):
        ctypes.string_at(0)
    if now("hang_at"):
        time.sleep(_HOUR_S)


def run(job: WorkerJob, channel: Channel, import_s: float) -> Record:
    spec, script = job.spec, split_assignments("option", job.spec.option)
    steps, warmup = spec.resolve_steps()
    sys.stderr.write("a package has something to say\n")
    if "bad_input" in script or spec.data == "bad":
        raise BadInputError(script.get("bad_input", "a_word"))
    channel.enter("build")
    channel.partial(
        {"resolved": {"steps": steps}, "environment": {"threads": {"intra_op": 1}}, "phases_s": {"import": import_s}}
    )
    channel.enter("initialize")
    if "notice" in script:
        logging.getLogger("systems.native.build").info(script["notice"])
    if "prints" in script:  # as a package that tells its environment and dies of it
        sys.stderr.write(f"the environment has {os.environ[script['prints']]}\n")
        raise RuntimeError(f"{os.environ[script['prints']]} was refused")
    importlib.import_module(script.get("import", "sys"))
    identity = {"run_id": job.run_id, "started_at": job.started_at, "replicate": job.replicate, "spec": spec}
    if int(script.get("rank", job.rank)) != job.rank:
        if script.get("others") != "follow":
            time.sleep(_HOUR_S)
        reason = {"message": "another rank is gone", "phase": "step", "rank": job.rank, "follows": True}
        return build({**identity, "status": "failed", "reason": reason})
    misbehave(0, script)
    if script.get("tell_at") == "0":
        time.sleep(0.3)  # after those who follow
        reason = {"message": "the script finds no room", "phase": "initialize", "rank": job.rank, "tier": "host"}
        return build({**identity, "status": "oom", "reason": reason})
    for step in range(1, steps + 1):
        if step in (1, warmup + 1):
            channel.enter("step" if step > warmup else "warm-up")
        misbehave(step, script)
        time.sleep(float(script.get("step_time_s", 0)))
        channel.step(step, steps, 1.0)
    if spec.checkpoint is not None:
        channel.enter("save")
        (Path(spec.checkpoint) / "data-0123456789abcdef").mkdir(parents=True)
        misbehave(steps + 1, script)
    return build({**identity, "status": "ok"})


if __name__ == "__main__":
    stand_in = types.ModuleType("harness.running")
    vars(stand_in)["run"] = run
    sys.modules["harness.running"] = vars(harness)["running"] = stand_in
    from harness.worker import main

    main()
