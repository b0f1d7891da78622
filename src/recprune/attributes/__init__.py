"""What items are like, as columns; and which items a condition on these columns is true of."""
