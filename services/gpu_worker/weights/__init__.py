"""Getting weights: downloads and conversions into complete model folders. Used once per model, not while serving."""
