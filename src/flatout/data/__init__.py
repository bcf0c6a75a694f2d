"""Text to batches: tokenizers, readers, packing into shards, window order, loaders. Import from the modules."""
