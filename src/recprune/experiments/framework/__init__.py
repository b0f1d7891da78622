"""What every experiment is made of."""
