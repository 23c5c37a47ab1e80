"""Claims and what they rest on: races between recipes, ablations, and the reports of both."""
