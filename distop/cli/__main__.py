"""``python -m distop.cli``: the same as ``distop``."""

from distop.cli.main import main

if __name__ == "__main__":
    main()
