"""Static analysis of patched source: nothing is imported or executed."""
