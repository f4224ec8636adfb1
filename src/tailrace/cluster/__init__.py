"""Several processes as one server: placement of streams, workers, and the links between them."""
