"""Measurements: each module is one benchmark, run with `make bench`."""
