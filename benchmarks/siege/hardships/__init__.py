"""What is done to the service, one hardship a file."""
