"""Encoders and item embeddings, which fit each other in any combination."""
