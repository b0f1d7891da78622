"""Recommendations for every user of Parquet files: planned, answered part by part, resumable."""
