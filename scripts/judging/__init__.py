"""The parts of scripts/oracle: generated tables, judged row by row in plain Python."""
