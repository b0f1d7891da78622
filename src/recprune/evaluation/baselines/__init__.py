"""Simple recommenders that a model has to beat before its figures mean anything."""
