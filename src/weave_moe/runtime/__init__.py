"""What runs compiled code: compilers, their cache on disk, drivers."""
