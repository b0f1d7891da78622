"""The users' histories."""
