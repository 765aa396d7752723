"""The command line: thin click commands over importable logic. ``main.run`` is the entry point."""
