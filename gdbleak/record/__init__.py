"""What is put into a live process on request: the agent, its recordings, and the guard that takes it out again."""
