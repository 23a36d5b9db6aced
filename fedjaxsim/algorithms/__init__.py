"""The systems of the papers and their baselines, one file each, written for one client."""
