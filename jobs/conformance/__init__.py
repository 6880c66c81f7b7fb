"""Media files with burnt-in ground truth, and what decoders make of them."""
