"""Other projects' own interfaces over KVX, one module a project. Import the module: `from kvx.adapters import dynamo`."""
