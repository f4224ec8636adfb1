"""Several processes as one server: each owns a share of the streams, any of them answers for all."""
