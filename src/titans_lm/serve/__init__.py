"""A server with one memory per conversation: OpenAI's completions and chat, and memories made from documents."""
