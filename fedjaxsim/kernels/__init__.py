"""What is there for speed alone: each file has its plain version as its test."""
