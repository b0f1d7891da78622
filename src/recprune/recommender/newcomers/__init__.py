"""Items that a model does not know yet, and the codes that suit them."""
