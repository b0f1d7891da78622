"""The commands of `recprune`, one file each: what it can be told, and what it then does."""
