"""Generated from protos/headrace/v1; do not edit."""
