"""What the routes of every subject share: context, responses, request headers, client address."""
