"""OpenTelemetry traces: what a span is, how it is sent, and who makes one. None of it runs by default."""
