"""Accountants: one file each, and how a ledger is composed by the one that describes it."""
