"""What users call: commands, and the Python functions behind them."""
