"""The operation types that come with distop: installed as `distop_behaviors`, found by entry points (I44)."""
