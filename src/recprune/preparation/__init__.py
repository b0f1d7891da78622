"""What a model may know: hold-out, codebook, and both in one folder."""
