"""The supervisor and its workers."""
