"""The operation types that come with distop.

One module or package each, built on ``distop.behavior``.
"""
