"""Accountants, one per file, and the composition of a ledger by those that describe it."""
