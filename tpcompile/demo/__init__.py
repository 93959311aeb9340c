"""A plain-PyTorch GPT, a text to train it on, and the demo that trains it in parallel and alone."""
