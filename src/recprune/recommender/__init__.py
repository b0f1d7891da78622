"""Ids, encoder, index, popularity and attributes in one folder, and the way to ask it."""
