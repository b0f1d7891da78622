"""The exact search: an index, its methods, and what comes back."""
