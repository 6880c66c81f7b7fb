"""What `train_tiny.py` trains, in pieces."""
