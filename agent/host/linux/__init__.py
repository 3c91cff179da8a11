"""Linux behind the seam."""
