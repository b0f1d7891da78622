"""From log files to compact, frozen interactions."""
