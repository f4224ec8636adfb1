"""Shared by the routes of all subjects: context, responses, request headers, client address."""
