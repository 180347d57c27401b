"""What only looks at the engine: descriptions, memory reports and traces."""
