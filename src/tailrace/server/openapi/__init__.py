"""The OpenAPI description of the HTTP API."""
