"""What `eesd bench` and `eesd demo` run: engines side by side, one measuring function, tables."""
