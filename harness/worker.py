"""The entry of a run's own process: takes a job from its standard input, hands a record to its parent.

Nothing heavy is imported before the kernel has been told that this process dies with its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time

from harness.channel import Channel, WorkerJob
from harness.collecting import uncollected

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however that dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    job = WorkerJob.model_validate_json(sys.stdin.buffer.read())
    die_with(job.parent_pid)
    faulthandler.enable(all_threads=False)  # short enough for the last lines that a record keeps
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # a run that is timed out says where it was
    channel = Channel(job.descriptor)
    channel.enter("start")
    started_s = time.perf_counter()
    with uncollected():
        from harness import running
    from harness.output import show_notices
    from harness.spec import BadInputError

    show_notices()
    try:
        channel.record(running.run(job, channel, import_s=time.perf_counter() - started_s))
    except BadInputError as error:
        channel.bad_input(str(error))


if __name__ == "__main__":  # a system may spawn processes, which import this file again
    main()
