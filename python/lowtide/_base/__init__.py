"""What every room may use: memory of a device, lines that ranks compare, names."""
