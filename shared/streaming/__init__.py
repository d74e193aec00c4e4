"""Bringing layers into memory ahead of use, inside a budget."""
