"""NIXL: memory that peers read and write by descriptors, and files."""
