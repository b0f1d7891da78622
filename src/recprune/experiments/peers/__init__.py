"""What people would use instead."""
