"""Text over HTTP: an OpenAI-compatible server, its chat page, and the process that decodes."""
