"""What every layer may use: points, the model's description, errors. Imports nothing of ours."""
