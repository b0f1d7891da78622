"""A catalogue that changes: items come and go, and every answer is that of a fresh index."""
