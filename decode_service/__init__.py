"""Turns KV caches into tokens; owns all state of a request."""
