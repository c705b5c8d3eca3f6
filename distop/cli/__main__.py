"""``python -m distop.cli``: the same as ``distop``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # -m has put the current folder first: no module of it is imported.
        del sys.path[0]
    from distop.cli.main import main

    main()
