"""Files in local folders and object stores: reading, writing, removing, and where they may be."""
