"""How good it is, beside what, and how sure that is."""
