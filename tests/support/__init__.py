"""What tests share: problems, systems of their own, killed disks, processes that work together."""
