"""Benchmarks: each prints a table, writes JSON, and compares ratios within one run."""
