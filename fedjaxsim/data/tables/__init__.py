"""Readers of files, tables, images and text, for `runs` and `cli`: no round imports them."""
