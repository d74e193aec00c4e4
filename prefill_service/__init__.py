"""Turns prompts into KV caches; keeps nothing beyond the call."""
