"""Whisper through transformers."""
