"""Faster forms of plain operations; each file is tested against the plain form."""
