"""Runs ``distop`` as ``python -m distop.cli``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # -m has put the current folder first: no module may be imported from it.
        del sys.path[0]
    from distop.cli.main import main

    main()
