"""The operation types that come with distop, one module or package each; they know only ``distop.behavior``."""
