"""``python -m orlop``: the same as the command ``orlop``.

In: the command line. Out: an exit code. Never: anything of its own.
"""

from orlop.cli.main import main

if __name__ == "__main__":
    main()
