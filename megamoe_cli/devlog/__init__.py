"""The development log: a journal of what ran (journal.py), and entries in Markdown made from it (docs/log.md)."""
