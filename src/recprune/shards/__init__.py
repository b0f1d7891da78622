"""An index in shards: on disk, as Ray actors, and the front that asks them."""
