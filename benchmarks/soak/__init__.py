"""A soak of the living catalogue: for an hour everything changes, and every answer is checked."""
