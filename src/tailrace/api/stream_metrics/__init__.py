"""`__stream_metrics__`: what the server measures about itself, as records on a stream of its own."""
