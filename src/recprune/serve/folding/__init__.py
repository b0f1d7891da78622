"""New items that users take are given codes while the service runs."""
