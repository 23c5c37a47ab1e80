"""nanosprint: train GPT-2-class language models to a target loss in the least wall-clock time, and prove it."""
