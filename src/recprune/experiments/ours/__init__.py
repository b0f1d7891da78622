"""What the paper did not measure."""
