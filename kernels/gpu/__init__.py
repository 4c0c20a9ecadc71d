"""Every kernel in Triton, with the names and signatures of `reference`."""
