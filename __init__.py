"""Durable LLM agent runs on Ray."""
