"""Names in the graph of an encoder, for those who write it and those who run it."""

VECTORS = "vectors"  # what it calls the vectors of items
