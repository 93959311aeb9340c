"""Programs on disk: written for every rank, read back and checked, and in other formats."""
