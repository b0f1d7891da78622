"""The commands of `recprune`, one file each: its options, and what it does."""
