"""The parts of scripts/oracle: generated tables, and their correct results computed row by row in plain Python."""
