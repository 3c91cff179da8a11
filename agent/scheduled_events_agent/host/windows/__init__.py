"""Windows behind the seam."""
