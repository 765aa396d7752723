"""Tuning: the search space, the tuner, the lookup, and the tables in ``tables/*.yaml`` (imported as ``megamoe_cli.tuning``; docs/tuning.md)."""
