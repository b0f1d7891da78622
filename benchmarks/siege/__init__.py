"""A siege of the service: twice the load that fits, while everything around it goes wrong."""
