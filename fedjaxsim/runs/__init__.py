"""Settings, building, running and keeping: what the commands of the program share."""
