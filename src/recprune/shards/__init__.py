"""An index in shards: on disk, on Ray Serve, and the front that asks them."""
