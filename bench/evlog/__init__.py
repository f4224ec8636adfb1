"""Searches and aggregates over wide events, beside the Prisma server."""
