"""The description of the whole HTTP surface, OpenAPI 3.1, in small parts."""
