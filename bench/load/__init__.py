"""Load generation: arrivals, prompts, an HTTP client, metrics, results and plots. Knows servers by HTTP alone."""
