"""What is loaded, and what it answers."""
