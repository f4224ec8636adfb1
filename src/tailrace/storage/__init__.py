"""Storage: hot store, segments, manifests, object store, and the processes that move entries between them."""
