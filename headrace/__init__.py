"""Headrace: what users import."""
