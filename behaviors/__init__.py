"""The operation types that come with distop: one module or package each, built on ``distop.behavior``."""
