"""The program ``orlop``, also as ``python -m orlop``.

In: the command line. Out: an exit code. Never: a word on Ctrl-C, which may come before the commands are even there.
"""

import sys


def main() -> None:
    try:
        from orlop.cli.main import main as commands

        commands()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
