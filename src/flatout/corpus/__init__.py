"""Files of any kind to clean documents: sources, streams, readers, cleaning. Import from the modules."""
