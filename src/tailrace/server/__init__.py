"""The server process: application, stream and live routes, inspection, health, OpenAPI."""
