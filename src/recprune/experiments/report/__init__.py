"""From records to one report."""
