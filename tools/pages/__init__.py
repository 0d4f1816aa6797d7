"""What pages show of results/: tables and charts between markers."""
