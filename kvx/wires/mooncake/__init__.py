"""Mooncake: a store of objects in the memory of all who joined it, and its transfer engine."""
