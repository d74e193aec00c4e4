"""Drafts: where proposals come from."""
