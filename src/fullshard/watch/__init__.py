"""Descriptions, memory reports and traces: code that only reads the engine."""
