"""From a file to frames and speech, on one time axis; nothing here loads torch or ray, and only decoding loads av."""
