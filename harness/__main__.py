"""The `harness` command, also as `python -m harness`. Its imports take long enough for a Ctrl-C, which is one line as ever."""

import signal
import sys


def main() -> int:
    """The exit code."""
    try:
        from harness.cli import main as command

        return command()
    except KeyboardInterrupt:  # before the command had its own eye on it
        sys.stderr.write("harness: interrupted\n")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
